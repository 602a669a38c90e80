#include "cli/progress.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>

namespace k3::cli {

std::string human_bytes(int64_t bytes) {
  const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  auto value = static_cast<double>(bytes);
  int unit = 0;
  while (value >= 1024 && unit < 4) {
    value /= 1024;
    ++unit;
  }
  char text[32];
  std::snprintf(text, sizeof(text), unit == 0 ? "%.0f %s" : "%.1f %s", value, units[unit]);
  return text;
}

double monotonic_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

ProgressBar::ProgressBar(std::string verb, bool quiet, std::function<void(double)> also)
    : verb_(std::move(verb)),
      quiet_(quiet),
      terminal_(isatty(STDERR_FILENO) == 1),
      also_(std::move(also)),
      start_(monotonic_seconds()) {}

void ProgressBar::update(int64_t done, int64_t total) {
  const double fraction = total > 0 ? static_cast<double>(done) / static_cast<double>(total) : 1;
  if (also_) also_(fraction);
  if (quiet_) return;
  const double now = monotonic_seconds();
  const bool last = done >= total;
  if (!last && now - printed_ < (terminal_ ? 0.1 : 2.0)) return;
  printed_ = now;
  const double rate = static_cast<double>(done) / std::max(now - start_, 1e-9) / 1e9;
  if (terminal_) {
    constexpr int kWidth = 30;
    const int filled = static_cast<int>(fraction * kWidth);
    std::fprintf(stderr, "\r%s [%s%s] %3.0f%% of %s, %.1f GB/s%s", verb_.c_str(),
                 std::string(static_cast<size_t>(filled), '#').c_str(),
                 std::string(static_cast<size_t>(kWidth - filled), '.').c_str(), fraction * 100,
                 human_bytes(total).c_str(), rate, last ? "\n" : "");
  } else if (last || now - start_ > 2.0) {
    std::fprintf(stderr, "%s %3.0f%% of %s, %.1f GB/s\n", verb_.c_str(), fraction * 100,
                 human_bytes(total).c_str(), rate);
  }
  std::fflush(stderr);
}

}  // namespace k3::cli
