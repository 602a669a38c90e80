// Reading a request body field by field: each is taken with its type and range, and what nobody
// took is refused by name. The first error wins; later calls do nothing then. `null` is the same as
// absent.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_set>

#include "server/api_error.h"

namespace k3 {

class Fields {
 public:
  using Json = nlohmann::ordered_json;
  // `body` is an object. `prefix` leads field names in messages ("stream_options.").
  explicit Fields(const Json& body, std::string prefix = "");

  // The value, or null when absent or null. Marks the field as known.
  const Json* take(const std::string& name);
  // The field may be there and means nothing to this server; the type is still not looked at.
  void ignore(std::initializer_list<const char*> names);
  // The field is known but not supported, unless it is null or one of `harmless` (values that ask
  // for what this server does anyway).
  void refuse(const std::string& name, std::string_view why,
              std::initializer_list<Json> harmless = {});

  bool integer(const std::string& name, int64_t low, int64_t high, int64_t* out);
  bool number(const std::string& name, double low, double high, float* out);
  bool boolean(const std::string& name, bool* out);
  bool string(const std::string& name, std::string* out);

  void fail(ApiError error);
  // The error, if any so far, then the fields nobody took.
  std::optional<ApiError> finish();
  bool failed() const { return error_.has_value(); }

 private:
  std::string full(const std::string& name) const { return prefix_ + name; }

  const Json& body_;
  std::string prefix_;
  std::unordered_set<std::string> known_;
  std::optional<ApiError> error_;
};

// How a value looks in a message: numbers and booleans as they are, strings cut at 40 bytes, arrays
// and objects by their kind.
std::string shown(const nlohmann::ordered_json& value);

// An integer in [low, high], or the error that names `field`.
std::optional<ApiError> check_integer(const nlohmann::ordered_json& value, const std::string& field,
                                      int64_t low, int64_t high, int64_t* out);

}  // namespace k3
