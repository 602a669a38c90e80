// One step of UTF-8 decoding, shared by the pre-tokeniser, the detokeniser and the output parser.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace k3 {

// What stands at the start of some bytes. Strict UTF-8: no overlong forms, no surrogates, nothing
// beyond U+10FFFF.
struct Utf8Step {
  enum class Kind : uint8_t {
    kChar,        // a whole character: `size` bytes, code point `cp`
    kIncomplete,  // all the bytes there are could begin a character: `size` of them
    kInvalid,     // no character begins so: `size` bytes are one maximal invalid prefix (>= 1)
  };
  Kind kind;
  uint8_t size;
  char32_t cp;
};

// `bytes` is not empty.
inline Utf8Step utf8_step(std::string_view bytes) {
  const auto at = [bytes](size_t i) { return static_cast<unsigned char>(bytes[i]); };
  const unsigned char lead = at(0);
  if (lead < 0x80) return {Utf8Step::Kind::kChar, 1, lead};
  size_t size = 0;
  unsigned char low = 0x80;  // what the second byte may be
  unsigned char high = 0xbf;
  if (lead >= 0xc2 && lead <= 0xdf) {
    size = 2;
  } else if (lead >= 0xe0 && lead <= 0xef) {
    size = 3;
    if (lead == 0xe0) low = 0xa0;
    if (lead == 0xed) high = 0x9f;
  } else if (lead >= 0xf0 && lead <= 0xf4) {
    size = 4;
    if (lead == 0xf0) low = 0x90;
    if (lead == 0xf4) high = 0x8f;
  } else {
    return {Utf8Step::Kind::kInvalid, 1, 0};
  }
  char32_t cp = lead & (0x7f >> size);
  for (size_t i = 1; i < size; ++i) {
    if (i == bytes.size()) return {Utf8Step::Kind::kIncomplete, static_cast<uint8_t>(i), 0};
    const unsigned char c = at(i);
    if (c < low || c > high) return {Utf8Step::Kind::kInvalid, static_cast<uint8_t>(i), 0};
    low = 0x80;
    high = 0xbf;
    cp = (cp << 6) | (c & 0x3f);
  }
  return {Utf8Step::Kind::kChar, static_cast<uint8_t>(size), cp};
}

// `bytes` as UTF-8, what is invalid replaced by U+FFFD.
std::string to_valid_utf8(std::string_view bytes);

}  // namespace k3
