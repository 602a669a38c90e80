#include "server/fields.h"

#include <algorithm>
#include <cmath>

namespace k3 {

std::string shown(const nlohmann::ordered_json& value) {
  if (value.is_array()) return cat("an array of ", value.size());
  if (value.is_object()) return "an object";
  std::string text = value.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  if (text.size() > 40) {
    size_t cut = 40;
    while (cut > 0 && (static_cast<unsigned char>(text[cut]) & 0xC0) == 0x80) --cut;
    text = text.substr(0, cut) + (value.is_string() ? "...\"" : "...");
  }
  return text;
}

std::optional<ApiError> check_integer(const nlohmann::ordered_json& value, const std::string& field,
                                      int64_t low, int64_t high, int64_t* out) {
  if (!value.is_number_integer()) {
    return bad_field(field, field, ": found ", shown(value), ", expected an integer");
  }
  const bool huge = value.is_number_unsigned() && value.get<uint64_t>() > uint64_t{INT64_MAX};
  const int64_t v = huge ? 0 : value.get<int64_t>();
  if (huge || v < low || v > high) {
    if (low == INT64_MIN || high == INT64_MAX) {
      return bad_field(field, field, ": found ", shown(value), ", expected an integer ",
                       low == INT64_MIN ? "of 64 bits with sign" : cat("of at least ", low),
                       huge ? " that fits 63 bits" : "");
    }
    return bad_field(field, field, ": found ", shown(value), ", expected an integer from ", low,
                     " to ", high);
  }
  *out = v;
  return std::nullopt;
}

Fields::Fields(const Json& body, std::string prefix) : body_(body), prefix_(std::move(prefix)) {}

const Fields::Json* Fields::take(const std::string& name) {
  known_.insert(name);
  if (error_) return nullptr;
  const auto it = body_.find(name);
  if (it == body_.end() || it->is_null()) return nullptr;
  return &*it;
}

void Fields::ignore(std::initializer_list<const char*> names) {
  for (const char* name : names) known_.insert(name);
}

void Fields::refuse(const std::string& name, std::string_view why,
                    std::initializer_list<Json> harmless) {
  const Json* value = take(name);
  if (value == nullptr) return;
  if (std::find(harmless.begin(), harmless.end(), *value) != harmless.end()) return;
  fail({400, cat(full(name), ": found ", shown(*value), "; ", why), "invalid_request_error",
        full(name), "unsupported_parameter"});
}

bool Fields::integer(const std::string& name, int64_t low, int64_t high, int64_t* out) {
  const Json* value = take(name);
  if (value == nullptr) return false;
  if (auto error = check_integer(*value, full(name), low, high, out)) {
    fail(std::move(*error));
    return false;
  }
  return true;
}

bool Fields::number(const std::string& name, double low, double high, float* out) {
  const Json* value = take(name);
  if (value == nullptr) return false;
  if (!value->is_number()) {
    fail(bad_field(full(name), full(name), ": found ", shown(*value), ", expected a number"));
    return false;
  }
  const double v = value->get<double>();
  if (!std::isfinite(v) || v < low || v > high) {
    fail(bad_field(full(name), full(name), ": found ", shown(*value), ", expected a number from ",
                   low, " to ", high));
    return false;
  }
  *out = static_cast<float>(v);
  return true;
}

bool Fields::boolean(const std::string& name, bool* out) {
  const Json* value = take(name);
  if (value == nullptr) return false;
  if (!value->is_boolean()) {
    fail(bad_field(full(name), full(name), ": found ", shown(*value), ", expected true or false"));
    return false;
  }
  *out = value->get<bool>();
  return true;
}

bool Fields::string(const std::string& name, std::string* out) {
  const Json* value = take(name);
  if (value == nullptr) return false;
  if (!value->is_string()) {
    fail(bad_field(full(name), full(name), ": found ", shown(*value), ", expected a string"));
    return false;
  }
  *out = value->get<std::string>();
  return true;
}

void Fields::fail(ApiError error) {
  if (!error_) error_ = std::move(error);
}

std::optional<ApiError> Fields::finish() {
  if (error_) return error_;
  std::string unknown, first;
  int count = 0;
  for (const auto& [name, value] : body_.items()) {
    if (known_.count(name) != 0) continue;
    if (count == 0) first = full(name).substr(0, 100);
    if (count < 8) unknown += (count == 0 ? "" : ", ") + full(name).substr(0, 100);
    ++count;
  }
  if (count == 0) return std::nullopt;
  if (count > 8) unknown += cat(" and ", count - 8, " more");
  return ApiError{400,
                  cat("unknown field", count > 1 ? "s" : "", ": ", unknown,
                      " (this server refuses what it would have to ignore; docs/serving.md lists "
                      "the fields)"),
                  "invalid_request_error", first, "unknown_parameter"};
}

}  // namespace k3
