// Any JSON as a chat request: refused with a message, or rendered. A rendered prompt holds exactly
// as many control tokens as the renderer put there: none can come from the request's text.
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "text/chat.h"

namespace {

std::shared_ptr<const k3::Tokenizer> byte_tokenizer() {
  constexpr std::string_view kAlphabet =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string file;
  for (int b = 0; b < 256; ++b) {
    file += kAlphabet[static_cast<size_t>(b >> 2)];
    file += kAlphabet[static_cast<size_t>((b & 3) << 4)];
    file += "== " + std::to_string(b) + "\n";
  }
  const char* config = R"({"added_tokens_decoder": {"256": {"content": "[BOS]"},
      "257": {"content": "[EOS]"}, "258": {"content": "<|end_of_msg|>"},
      "259": {"content": "<|open|>"}, "260": {"content": "<|close|>"},
      "261": {"content": "<|sep|>"}}})";
  return k3::Tokenizer::parse(file, config, 512).value();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const auto tokenizer = byte_tokenizer();
  const auto body = nlohmann::ordered_json::parse(data, data + size, nullptr, false);
  if (body.is_discarded()) return 0;
  const auto request = k3::parse_chat_request(body);
  if (!request.ok()) {
    if (request.status().code() != k3::ErrorCode::kInvalidArgument) std::abort();
    (void)nlohmann::json(request.status().message()).dump();  // valid UTF-8, or this throws
    return 0;
  }
  const auto text = k3::render_chat_text(request.value());
  const auto ids = k3::render_chat(request.value(), *tokenizer);
  if (text.ok() != ids.ok()) std::abort();
  if (!text.ok()) return 0;
  // One token a byte here: each control token stands where the text has its spelling.
  std::string spelled;
  int open = 0;
  int close = 0;
  int sep = 0;
  for (const int32_t id : ids.value()) {
    spelled += tokenizer->token_bytes(id);
    open += id == tokenizer->markup().open;
    close += id == tokenizer->markup().close;
    sep += id == tokenizer->markup().sep;
  }
  if (spelled != text.value()) std::abort();
  if (open + close != sep) std::abort();
  if (request->add_generation_prompt ? open != close + 2 : open != close) std::abort();
  return 0;
}
