// K3's pre-tokeniser as a scanner: what pre_tokenize (tokenizer.h) is made of, without its vector.
#pragma once

#include <cstddef>
#include <string_view>

namespace k3 {

// The reference feeds its regular expression slices of at most this many characters, cut further
// where more than kMaxRunChars characters are all white space or all not (docs/text.md#slices).
inline constexpr size_t kMaxSliceChars = 400'000;
inline constexpr size_t kMaxRunChars = 25'000;

// The end of the slice that starts at text[begin]; begin < text.size(). `slice_chars` is the
// caller's count of characters since the last 400,000-character cut: start it at 0.
size_t next_slice(std::string_view text, size_t begin, size_t* slice_chars);

// The length of the piece at the start of `text` (not empty), which is (the rest of) one slice.
size_t next_piece(std::string_view text);

// Calls fn(piece) for every piece of every slice, in order; the pieces join to `text`.
template <typename Fn>
void for_each_slice(std::string_view text, Fn fn) {
  size_t slice_chars = 0;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = next_slice(text, begin, &slice_chars);
    fn(text.substr(begin, end - begin));
    begin = end;
  }
}
template <typename Fn>
void for_each_piece_of_slice(std::string_view slice, Fn fn) {
  while (!slice.empty()) {
    const size_t size = next_piece(slice);
    fn(slice.substr(0, size));
    slice.remove_prefix(size);
  }
}

}  // namespace k3
