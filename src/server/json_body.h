// A request body as JSON, in linear time whatever it holds.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string_view>

#include "server/api_error.h"

namespace k3 {

inline constexpr int kMaxBodyDepth = 64;

// Parses `text` into `*out`, keeping member order. Refused with 400: what is not JSON (the byte is
// named; the text is not repeated), strings that are not UTF-8, numbers beyond double, nesting
// deeper than kMaxBodyDepth, a key given twice in one object (which of the two would count?), a
// body that is not an object.
std::optional<ApiError> parse_json_body(std::string_view text, nlohmann::ordered_json* out);

}  // namespace k3
