// Any bytes as tiktoken.model and tokenizer_config.json: refused with a message, or a vocabulary
// that encodes and decodes. The input is the ranks, a NUL, the config, a NUL, text to encode; the
// first byte chooses whether the 256 single bytes are put in front, so that valid files are common.
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "text/tokenizer.h"

namespace {

std::string byte_ranks() {
  constexpr std::string_view kAlphabet =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string file;
  for (int b = 0; b < 256; ++b) {
    file += kAlphabet[static_cast<size_t>(b >> 2)];
    file += kAlphabet[static_cast<size_t>((b & 3) << 4)];
    file += "== " + std::to_string(b) + "\n";
  }
  return file;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const std::string bytes = byte_ranks();
  std::string_view input(reinterpret_cast<const char*>(data), size);
  if (input.empty()) return 0;
  const bool with_bytes = (input[0] & 1) == 0;
  const int64_t vocab_size = with_bytes ? 512 : 300 + (input[0] & 0x7f);
  input.remove_prefix(1);
  const auto take = [&input] {
    const size_t end = input.find('\0');
    const std::string_view part = input.substr(0, end);
    input.remove_prefix(end == std::string_view::npos ? input.size() : end + 1);
    return part;
  };
  const std::string ranks = (with_bytes ? bytes : std::string()) + std::string(take());
  const std::string config(take());
  const auto parsed = k3::Tokenizer::parse(ranks, config, vocab_size);
  if (!parsed.ok()) {
    if (parsed.status().message().empty()) std::abort();
    return 0;
  }
  const k3::Tokenizer& tokenizer = *parsed.value();
  std::string joined;
  for (const std::string_view piece : k3::pre_tokenize(input)) joined += piece;
  if (joined != input) std::abort();
  joined.clear();
  for (const int32_t id : tokenizer.encode(input)) {
    if (id < 0 || tokenizer.is_special(id)) std::abort();
    joined += tokenizer.token_bytes(id);
  }
  if (joined != input) std::abort();
  joined.clear();
  for (const int32_t id : tokenizer.encode_with_special(input)) joined += tokenizer.token_bytes(id);
  if (joined != input) std::abort();
  return 0;
}
