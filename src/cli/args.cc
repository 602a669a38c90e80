#include "cli/args.h"

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>

namespace k3::cli {

int exit_code(const Status& status) {
  switch (status.code()) {
    case ErrorCode::kOk:
      return 0;
    case ErrorCode::kInvalidArgument:
      return 2;
    case ErrorCode::kCheckpoint:
      return 3;
    case ErrorCode::kMemory:
      return 4;
    case ErrorCode::kDevice:
      return 5;
    case ErrorCode::kRankLost:
      return 6;
    case ErrorCode::kUnavailable:
    case ErrorCode::kInternal:
      return 1;
  }
  return 1;
}

int report(const Status& status) {
  if (!status.ok()) std::fprintf(stderr, "k3: %s\n", status.message().c_str());
  return exit_code(status);
}

Result<std::string> read_input(const std::string& flag, const std::string& path) {
  constexpr size_t kMaxBytes = size_t{64} << 20;
  const std::string where = flag + " " + path;
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> opened(nullptr, std::fclose);
  std::FILE* in = stdin;
  if (path != "-") {
    opened.reset(std::fopen(path.c_str(), "rb"));
    in = opened.get();
    if (in == nullptr) return invalid_argument(where, ": cannot be read: ", std::strerror(errno));
  }
  std::string text;
  std::array<char, 1 << 16> buffer;
  while (const size_t n = std::fread(buffer.data(), 1, buffer.size(), in)) {
    text.append(buffer.data(), n);
    if (text.size() > kMaxBytes) {
      return invalid_argument(where, ": more than ", kMaxBytes, " bytes, which is the limit");
    }
  }
  if (std::ferror(in) != 0) {
    return invalid_argument(where, ": cannot be read: ", std::strerror(errno));
  }
  return text;
}

}  // namespace k3::cli
