#include "server/api_error.h"

#include <cctype>
#include <nlohmann/json.hpp>

namespace k3 {
namespace {

// The field path that opens a message, if one does: letters, digits and "_.[]" up to a colon or
// space.
std::string leading_field(const std::string& message) {
  size_t end = 0;
  while (end < message.size() &&
         (std::isalnum(static_cast<unsigned char>(message[end])) != 0 ||
          std::string_view("_.[]").find(message[end]) != std::string::npos)) {
    ++end;
  }
  if (end == 0 || end >= message.size()) return "";
  const bool path = message.find_first_of("_[.") < end;
  if (message[end] == ':' || (message[end] == ' ' && path)) return message.substr(0, end);
  return "";
}

}  // namespace

ApiError to_api_error(const Status& status) {
  switch (status.code()) {
    case ErrorCode::kInvalidArgument:
      return {400, status.message(), "invalid_request_error", leading_field(status.message()),
              "invalid_value"};
    case ErrorCode::kUnavailable:
      return {503, status.message(), "service_unavailable", "", "unavailable"};
    default:
      return {500, status.message(), "server_error", "", "engine_error"};
  }
}

std::string error_body(const ApiError& error) {
  nlohmann::ordered_json body;
  auto& e = body["error"];
  e["message"] = error.message;
  e["type"] = error.type;
  e["param"] = error.param.empty() ? nlohmann::ordered_json() : nlohmann::ordered_json(error.param);
  e["code"] = error.code.empty() ? nlohmann::ordered_json() : nlohmann::ordered_json(error.code);
  return body.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

}  // namespace k3
