// The reference splits text with one regular expression of eight alternatives. This is that
// expression as a scanner: docs/text.md#pre-tokeniser says why each branch gives the same match as
// backtracking would, and why the whole is linear.
#include "text/pre_tokenizer.h"

#include <unicode/uchar.h>
#include <unicode/uscript.h>

#include <array>
#include <cstdint>
#include <vector>

#include "text/tokenizer.h"
#include "text/utf8.h"

namespace k3 {
namespace {

// What the expression asks of a character. kUpperish and kLowerish are its two letter classes (both
// without Han); Lm, Lo and marks are in both.
enum CharClass : uint8_t {
  kUpperish = 1,  // Lu Lt Lm Lo M, not Han
  kLowerish = 2,  // Ll Lm Lo M, not Han
  kLetter = 4,    // L, Han or not
  kNumber = 8,    // N
  kSpace = 16,    // White_Space
  kNewline = 32,  // CR LF
  kHan = 64,      // Script=Han
};

constexpr std::array<uint8_t, 128> kAscii = [] {
  std::array<uint8_t, 128> table{};
  for (int c = 'A'; c <= 'Z'; ++c) table[c] = kLetter | kUpperish;
  for (int c = 'a'; c <= 'z'; ++c) table[c] = kLetter | kLowerish;
  for (int c = '0'; c <= '9'; ++c) table[c] = kNumber;
  for (const unsigned char c : {'\t', '\v', '\f', ' '}) table[c] = kSpace;
  for (const unsigned char c : {'\n', '\r'}) table[c] = kSpace | kNewline;
  return table;
}();

constexpr char32_t kFirstHan = 0x2e80;  // U+2E80 CJK RADICAL REPEAT; no Han script below it

uint8_t classify(char32_t cp) {
  if (cp < 0x80) return kAscii[cp];
  const auto c = static_cast<UChar32>(cp);
  uint8_t cls = 0;
  switch (u_charType(c)) {
    case U_UPPERCASE_LETTER:
    case U_TITLECASE_LETTER:
      cls = kLetter | kUpperish;
      break;
    case U_LOWERCASE_LETTER:
      cls = kLetter | kLowerish;
      break;
    case U_MODIFIER_LETTER:
    case U_OTHER_LETTER:
      cls = kLetter | kUpperish | kLowerish;
      break;
    case U_NON_SPACING_MARK:
    case U_ENCLOSING_MARK:
    case U_COMBINING_SPACING_MARK:
      cls = kUpperish | kLowerish;
      break;
    case U_DECIMAL_DIGIT_NUMBER:
    case U_LETTER_NUMBER:
    case U_OTHER_NUMBER:
      cls = kNumber;
      break;
    case U_SPACE_SEPARATOR:
    case U_LINE_SEPARATOR:
    case U_PARAGRAPH_SEPARATOR:
    case U_CONTROL_CHAR:
      if (u_isUWhiteSpace(c)) cls = kSpace;
      break;
    default:
      break;
  }
  if (cp >= kFirstHan) {
    // Script, not Script_Extensions: U+3001 and its like stay punctuation.
    UErrorCode error = U_ZERO_ERROR;
    if (uscript_getScript(c, &error) == USCRIPT_HAN) {
      cls = static_cast<uint8_t>((cls & ~(kUpperish | kLowerish)) | kHan);
    }
  }
  return cls;
}

struct Char {
  uint8_t cls = 0;
  uint8_t size = 0;  // 0 at the end of the text

  bool is(int classes) const { return (cls & classes) != 0; }
  // [^\r\n\p{L}\p{N}]
  bool may_lead_word() const { return size != 0 && !is(kNewline | kLetter | kNumber); }
  // [^\s\p{L}\p{N}]
  bool is_symbol() const { return size != 0 && !is(kSpace | kLetter | kNumber); }
};

class Scanner {
 public:
  explicit Scanner(std::string_view text) : text_(text) {}

  size_t next() const {
    const Char first = at(0);
    if (first.is(kHan)) return run(0, kHan);         // 1
    if (const size_t end = word(first)) return end;  // 2, 3
    if (first.is(kNumber)) {                         // 4
      size_t end = first.size;
      for (int i = 1; i < 3; ++i) {
        const Char c = at(end);
        if (!c.is(kNumber)) break;
        end += c.size;
      }
      return end;
    }
    const size_t symbols = text_[0] == ' ' ? 1 : 0;
    if (at(symbols).is_symbol()) {  // 5
      size_t end = symbols;
      for (Char c = at(end); c.is_symbol(); c = at(end)) end += c.size;
      return run(end, kNewline);
    }
    return space();  // 6, 7, 8
  }

 private:
  Char at(size_t i) const {
    if (i >= text_.size()) return {};
    const auto byte = static_cast<unsigned char>(text_[i]);
    if (byte < 0x80) return {kAscii[byte], 1};
    const Utf8Step step = utf8_step(text_.substr(i));
    // A byte that begins no character stands alone, as a symbol: never letter, number or space.
    if (step.kind != Utf8Step::Kind::kChar) return {0, 1};
    return {classify(step.cp), step.size};
  }

  // The end of the run of characters that have any of `classes`.
  size_t run(size_t i, int classes) const {
    for (Char c = at(i); c.is(classes); c = at(i)) i += c.size;
    return i;
  }

  // Alternatives 2 and 3 at the start of the text: [lead]? U* L+ suffix?, then [lead]? U+ L*
  // suffix?. 0 if neither matches.
  size_t word(Char first) const {
    const bool lead = first.may_lead_word();
    size_t end = lead ? lowerish_word(first.size) : 0;
    if (end == 0) end = lowerish_word(0);
    if (end == 0 && lead) end = upperish_word(first.size);
    if (end == 0) end = upperish_word(0);
    return end == 0 ? 0 : end + contraction(end);
  }

  // U* L+ from i. U* takes all it can; if no L follows, the expression backs up to the last
  // character of the run that is in both classes, and L+ is that one alone (what follows it in the
  // run is upper case).
  size_t lowerish_word(size_t i) const {
    size_t after_both = 0;
    Char c = at(i);
    for (; c.is(kUpperish); c = at(i)) {
      i += c.size;
      if (c.is(kLowerish)) after_both = i;
    }
    return c.is(kLowerish) ? run(i, kLowerish) : after_both;
  }

  size_t upperish_word(size_t i) const {
    const size_t end = run(i, kUpperish);
    return end == i ? 0 : run(end, kLowerish);
  }

  // The length of (?i:'s|'t|'re|'ve|'m|'ll|'d) at i, or 0. Case folding adds U+017F to s.
  size_t contraction(size_t i) const {
    const auto lower = [this](size_t k) -> char {
      if (k >= text_.size()) return 0;
      const char c = text_[k];
      return c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c;
    };
    if (lower(i) != '\'') return 0;
    const char a = lower(i + 1);
    if (a == 's' || a == 't' || a == 'm' || a == 'd') return 2;
    if (a == '\xc5' && lower(i + 2) == '\xbf') return 3;
    const char b = lower(i + 2);
    if ((a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l')) return 3;
    return 0;
  }

  size_t space() const {
    size_t end = 0;
    size_t last = 0;  // start of the run's last character
    size_t after_newline = 0;
    for (Char c = at(0); c.is(kSpace); c = at(end)) {
      last = end;
      end += c.size;
      if (c.is(kNewline)) after_newline = end;
    }
    if (after_newline != 0) return after_newline;      // 6: \s*[\r\n]+ backs up to the last newline
    if (end == text_.size() || last == 0) return end;  // 7 at the end of the text; 8
    return last;  // 7: leaves one white space for the word that follows
  }

  std::string_view text_;
};

// Python's str.isspace, which the slicing uses: White_Space and the four separators U+001C..001F.
bool python_is_space(char32_t cp) {
  return (cp >= 0x1c && cp <= 0x1f) || (classify(cp) & kSpace) != 0;
}

}  // namespace

size_t next_piece(std::string_view text) { return Scanner(text).next(); }

size_t next_slice(std::string_view text, size_t begin, size_t* slice_chars) {
  // Fewer bytes than a run may have characters: nothing to cut.
  if (text.size() <= kMaxRunChars) return text.size();
  size_t run_chars = 0;
  bool run_is_space = false;
  for (size_t i = begin; i < text.size();) {
    if (*slice_chars == kMaxSliceChars) {
      *slice_chars = 0;
      return i;
    }
    const Utf8Step step = utf8_step(text.substr(i));
    const bool is_char = step.kind == Utf8Step::Kind::kChar;
    const bool is_space = is_char && python_is_space(step.cp);
    if (run_chars == 0 || is_space != run_is_space) {
      run_chars = 1;
      run_is_space = is_space;
    } else if (++run_chars > kMaxRunChars) {
      return i;
    }
    ++*slice_chars;
    i += is_char ? step.size : 1;
  }
  return text.size();
}

std::vector<std::string_view> pre_tokenize(std::string_view text) {
  std::vector<std::string_view> pieces;
  for_each_slice(text, [&pieces](std::string_view slice) {
    for_each_piece_of_slice(slice, [&pieces](std::string_view piece) { pieces.push_back(piece); });
  });
  return pieces;
}

}  // namespace k3
