// An error as the OpenAI API says it: {"error":{"message","type","param","code"}} and a status.
#pragma once

#include <optional>
#include <string>

#include "core/status.h"

namespace k3 {

struct ApiError {
  int http_status = 400;
  std::string message;
  std::string type = "invalid_request_error";
  std::string param;  // the request field, empty = null
  std::string code;   // empty = null
};

// A request field is wrong. The message names the field, what was found and what is allowed.
template <typename... Args>
ApiError bad_field(std::string param, const Args&... message) {
  return {400, cat(message...), "invalid_request_error", std::move(param), "invalid_value"};
}

// What a Status of the engine or of text/ means to a client. kInvalidArgument becomes 400 with the
// field that leads the message ("messages[2].role: ...") as param.
ApiError to_api_error(const Status& status);

// {"error":{...}} as one line of JSON.
std::string error_body(const ApiError& error);

}  // namespace k3
