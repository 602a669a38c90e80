#include "text/utf8.h"

#include "text/tokenizer.h"

namespace k3 {
namespace {

constexpr std::string_view kReplacement = "\xef\xbf\xbd";  // U+FFFD

}  // namespace

std::string Utf8Stream::push(std::string_view bytes) {
  std::string joined;
  if (!tail_.empty()) {  // at most three bytes, so that joining stays linear
    joined = std::move(tail_);
    tail_.clear();
    joined.append(bytes);
    bytes = joined;
  }
  std::string out;
  out.reserve(bytes.size());
  size_t copied = 0;  // bytes[0, copied) are in `out`
  size_t i = 0;
  while (i < bytes.size()) {
    const Utf8Step step = utf8_step(bytes.substr(i));
    if (step.kind == Utf8Step::Kind::kIncomplete) break;
    if (step.kind == Utf8Step::Kind::kInvalid) {
      out.append(bytes, copied, i - copied);
      out.append(kReplacement);
      copied = i + step.size;
    }
    i += step.size;
  }
  out.append(bytes, copied, i - copied);
  tail_.assign(bytes.substr(i));
  return out;
}

std::string Utf8Stream::flush() {
  if (tail_.empty()) return {};
  tail_.clear();
  return std::string(kReplacement);
}

std::string to_valid_utf8(std::string_view bytes) {
  Utf8Stream stream;
  std::string text = stream.push(bytes);
  text += stream.flush();
  return text;
}

}  // namespace k3
