// What nlohmann's lexer lets pass though it is not JSON: it takes a NUL byte for the end of the
// text, so that anything may follow it, and it skips a byte order mark. Every parse of untrusted
// text asks here first.
#pragma once

#include <cstddef>
#include <string_view>

namespace k3 {

// Offset of the first such byte, or npos.
inline size_t json_forbidden_byte(std::string_view text) {
  return text.starts_with("\xef\xbb\xbf") ? 0 : text.find('\0');
}

}  // namespace k3
