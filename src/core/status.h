// Errors as values. Every fallible function below cli/ returns Status or Result<T>; nothing throws
// across a room's border. A message names the thing, what was found and what was expected, and is
// fit to print to a user as it stands.
#pragma once

#include <cassert>
#include <sstream>
#include <string>
#include <utility>
#include <variant>

namespace k3 {

// What kind of failure. cli/ maps these to exit codes (docs/cli.md), server/ to HTTP statuses.
enum class ErrorCode {
  kOk = 0,
  kInvalidArgument,  // the caller's request or flag is wrong: exit 2, HTTP 400
  kCheckpoint,       // config or checkpoint cannot be used: exit 3
  kMemory,           // does not fit: exit 4
  kDevice,           // device or driver: exit 5
  kRankLost,         // a peer rank is gone: exit 6
  kUnavailable,      // try again later (queue full, shutting down): HTTP 503
  kInternal,         // anything else: exit 1, HTTP 500
};

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(ErrorCode code, std::string message) : code_(code), message_(std::move(message)) {}
  static Status ok_status() { return {}; }

  bool ok() const { return code_ == ErrorCode::kOk; }
  ErrorCode code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  ErrorCode code_ = ErrorCode::kOk;
  std::string message_;
};

// Either a value or the Status that says why there is none.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : v_(std::move(value)) {}        // NOLINT(google-explicit-constructor)
  Result(Status status) : v_(std::move(status)) {  // NOLINT(google-explicit-constructor)
    assert(!std::get<Status>(v_).ok());
  }

  bool ok() const { return std::holds_alternative<T>(v_); }
  Status status() const { return ok() ? Status() : std::get<Status>(v_); }
  T& value() & { return std::get<T>(v_); }
  const T& value() const& { return std::get<T>(v_); }
  T&& value() && { return std::get<T>(std::move(v_)); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }

 private:
  std::variant<T, Status> v_;
};

// Joins anything streamable: cat("tensor ", name, ": shape ", shape).
template <typename... Args>
std::string cat(const Args&... args) {
  std::ostringstream out;
  (out << ... << args);
  return std::move(out).str();
}

template <typename... Args>
Status invalid_argument(const Args&... args) {
  return {ErrorCode::kInvalidArgument, cat(args...)};
}
template <typename... Args>
Status checkpoint_error(const Args&... args) {
  return {ErrorCode::kCheckpoint, cat(args...)};
}

#define K3_RETURN_IF_ERROR(expr)                                \
  do {                                                          \
    if (::k3::Status k3_s_ = (expr); !k3_s_.ok()) return k3_s_; \
  } while (0)
#define K3_CONCAT_INNER(a, b) a##b
#define K3_CONCAT(a, b) K3_CONCAT_INNER(a, b)
#define K3_ASSIGN_OR_RETURN(decl, expr) \
  K3_ASSIGN_OR_RETURN_IMPL(K3_CONCAT(k3_r_, __LINE__), decl, expr)
#define K3_ASSIGN_OR_RETURN_IMPL(tmp, decl, expr) \
  auto tmp = (expr);                              \
  if (!tmp.ok()) return tmp.status();             \
  decl = std::move(tmp).value()

}  // namespace k3
