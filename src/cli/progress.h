// Progress on standard error, and the sizes and times that go with it.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace k3::cli {

std::string human_bytes(int64_t bytes);
double monotonic_seconds();

// A bar on a terminal, a line every two seconds elsewhere, nothing when quiet. `also` gets the
// fraction done whatever is printed.
class ProgressBar {
 public:
  ProgressBar(std::string verb, bool quiet, std::function<void(double)> also = {});
  void update(int64_t done, int64_t total);

 private:
  std::string verb_;
  bool quiet_, terminal_;
  std::function<void(double)> also_;
  double start_, printed_ = 0;
};

}  // namespace k3::cli
