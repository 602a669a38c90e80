// Any ids as a model's output. Nothing throws; every call begins, gets arguments and ends, in that
// order; its arguments join to a JSON object; every event is valid UTF-8; and no text is invented:
// all of it together is no longer than what the ids spell, markup aside.
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "text/output_parser.h"

namespace {

// 256 single bytes, then the markup and some words of it, so that tags are a few ids away.
constexpr std::string_view kWords[] = {
    "think",   "response", "tools", "call",   "argument", "json",   "message",    " tool=\"",
    " key=\"", " type=\"", "\"",    "string", "number",   "object", "{\"a\": 1}", "&quot;"};

std::shared_ptr<const k3::Tokenizer> word_tokenizer() {
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
  return k3::Tokenizer::parse(file, config, 320).value();
}

void require(bool ok) {
  if (!ok) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const auto tokenizer = word_tokenizer();
  if (size == 0) return 0;
  // Bytes below 0xe0 are themselves; above, control tokens and words.
  std::vector<int32_t> ids;
  for (size_t i = 1; i < size; ++i) {
    const int byte = data[i];
    if (byte < 0xe0) {
      ids.push_back(byte);
    } else if (byte < 0xe8) {
      ids.push_back(256 + (byte - 0xe0));
    } else if (byte < 0xf8) {
      for (const char c : kWords[byte - 0xe8]) ids.push_back(static_cast<unsigned char>(c));
    } else {
      ids.push_back(byte);  // lead bytes that begin no character
    }
  }
  k3::OutputParser parser(tokenizer, (data[0] & 1) != 0);
  std::vector<std::string> arguments;
  std::vector<bool> ended;
  size_t plain = 0;
  const auto take = [&](const std::vector<k3::OutputEvent>& events) {
    for (const k3::OutputEvent& e : events) {
      (void)nlohmann::json(e.text).dump();  // valid UTF-8, or this throws
      const auto index = static_cast<size_t>(e.index);
      switch (e.kind) {
        case k3::OutputEvent::Kind::kReasoning:
        case k3::OutputEvent::Kind::kContent:
          require(!e.text.empty());
          plain += e.text.size();
          break;
        case k3::OutputEvent::Kind::kToolCallBegin:
          require(index == arguments.size() && !e.text.empty());
          require(ended.empty() || ended.back());
          arguments.emplace_back();
          ended.push_back(false);
          break;
        case k3::OutputEvent::Kind::kToolCallArgs:
          require(index + 1 == arguments.size() && !ended[index] && !e.text.empty());
          arguments[index] += e.text;
          break;
        case k3::OutputEvent::Kind::kToolCallEnd:
          require(index + 1 == arguments.size() && !ended[index]);
          ended[index] = true;
          break;
      }
    }
  };
  for (const int32_t id : ids) take(parser.push(id));
  take(parser.finish());
  require(parser.finish().empty());
  require(static_cast<size_t>(parser.num_tool_calls()) == arguments.size());
  for (size_t i = 0; i < arguments.size(); ++i) {
    require(ended[i]);
    require(nlohmann::json::parse(arguments[i], nullptr, false).is_object());
  }
  require(plain <= 3 * ids.size());  // a byte becomes U+FFFD at worst
  return 0;
}
