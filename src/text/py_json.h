// JSON as Python's json module reads and writes it: K3 was trained on prompts made that way.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "core/status.h"

namespace k3 {

// The deepest nesting of arrays and objects a request may have: everything that walks JSON below
// here recurses, and a prompt or schema nested deeper is an attack.
inline constexpr int kMaxJsonDepth = 128;

// Whether `value` nests no deeper than kMaxJsonDepth. Does not recurse.
bool json_depth_ok(const nlohmann::ordered_json& value);

enum class JsonStyle {
  kPlain,          // separators ", " and ": ", members in their order
  kCompactSorted,  // separators "," and ":", members by code point, recursively
};

// json.dumps(value, ensure_ascii=False): floats as repr prints them. `value` nests no deeper than
// kMaxJsonDepth.
std::string py_json_dumps(const nlohmann::ordered_json& value, JsonStyle style);

// repr(float): 1.0, 1e+16, 1e-05.
std::string py_float_repr(double value);

// Appends `text` (UTF-8) as the inside of a JSON string.
void append_json_escaped(std::string_view text, std::string* out);
// `text` as a JSON string, in quotes; what is not UTF-8 becomes U+FFFD.
std::string json_quoted(std::string_view text);

// Whether `text` is one JSON value and nothing else. Does not recurse.
bool is_json_text(std::string_view text);

// json.loads for tool arguments: integers of any length keep their digits through py_json_dumps.
struct ParsedJson {
  enum class Kind { kOk, kNotJson, kTooDeep } kind = Kind::kNotJson;
  nlohmann::ordered_json value;
};
ParsedJson py_json_loads(std::string_view text);

}  // namespace k3
