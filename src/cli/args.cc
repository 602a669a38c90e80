#include "cli/args.h"

#include <cstdio>

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

}  // namespace k3::cli
