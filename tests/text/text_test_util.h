// What the tests of this room share: files, vocabularies, and the output parser driven by a script.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "text/output_parser.h"
#include "text/tokenizer.h"

namespace k3::test {

using json = nlohmann::ordered_json;
using TokenizerPtr = std::shared_ptr<const Tokenizer>;

inline std::optional<std::string> read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) return std::nullopt;
  std::ostringstream data;
  data << in.rdbuf();
  return std::move(data).str();
}
inline std::string source_path(const std::string& relative) {
  return std::string(K3_SOURCE_DIR) + "/" + relative;
}
inline json read_json(const std::string& relative) {
  const auto text = read_file(source_path(relative));
  EXPECT_TRUE(text.has_value()) << relative;
  return json::parse(text.value_or("null"));
}

inline TokenizerPtr nano() {
  static const TokenizerPtr tokenizer = [] {
    auto loaded = Tokenizer::load(source_path("models/k3-nano"), 2048);
    EXPECT_TRUE(loaded.ok()) << loaded.status().message();
    return loaded.ok() ? loaded.value() : nullptr;
  }();
  return tokenizer;
}

// K3's own names of the special tokens, at their offset from the number of ranks.
inline std::string k3_tokenizer_config(int ranks) {
  const std::vector<std::pair<int, std::string>> names = {{0, "[BOS]"},
                                                          {1, "[EOS]"},
                                                          {2, "<|end_of_msg|>"},
                                                          {3, "<|open|>"},
                                                          {4, "<|close|>"},
                                                          {5, "<|sep|>"},
                                                          {6, "[start_header_id]"},
                                                          {7, "[end_header_id]"},
                                                          {9, "[EOT]"},
                                                          {18, "<|media_begin|>"},
                                                          {19, "<|media_content|>"},
                                                          {20, "<|media_end|>"},
                                                          {21, "<|media_pad|>"},
                                                          {65, "<osagent_mode>"},
                                                          {254, "[UNK]"},
                                                          {255, "[PAD]"}};
  json config;
  for (const auto& [offset, name] : names) {
    config["added_tokens_decoder"][std::to_string(ranks + offset)]["content"] = name;
  }
  return config.dump();
}

// The real vocabulary, where there is a copy of it beside the source tree: it is not ours to
// commit.
inline TokenizerPtr real_k3() {
  static const TokenizerPtr tokenizer = []() -> TokenizerPtr {
    for (const char* path : {"../shared/data/tiktoken.model", "../../shared/data/tiktoken.model"}) {
      const auto ranks = read_file(source_path(path));
      if (!ranks) continue;
      auto parsed = Tokenizer::parse(*ranks, k3_tokenizer_config(163584), 163840);
      EXPECT_TRUE(parsed.ok()) << parsed.status().message();
      if (parsed.ok()) return parsed.value();
    }
    return nullptr;
  }();
  return tokenizer;
}
#define K3_REQUIRE_REAL_VOCABULARY()                                                \
  if (::k3::test::real_k3() == nullptr) {                                           \
    GTEST_SKIP() << "no copy of K3's tiktoken.model (../shared/data) to test with"; \
  }

// --- the output parser, driven by ids ---

// Ids of a script: {O} {C} {S} {END} {EOS} are the control tokens, the rest is ordinary text.
inline std::vector<int32_t> script(const Tokenizer& t, std::string_view text) {
  const Tokenizer::Markup& m = t.markup();
  const std::vector<std::pair<std::string_view, int32_t>> controls = {
      {"{O}", m.open}, {"{C}", m.close}, {"{S}", m.sep}, {"{END}", m.end_of_msg}, {"{EOS}", m.eos}};
  std::vector<int32_t> ids;
  size_t begin = 0;
  for (size_t i = 0; i < text.size();) {
    bool hit = false;
    for (const auto& [spelling, id] : controls) {
      if (text.substr(i, spelling.size()) != spelling) continue;
      t.encode_append(text.substr(begin, i - begin), &ids);
      ids.push_back(id);
      i += spelling.size();
      begin = i;
      hit = true;
      break;
    }
    if (!hit) ++i;
  }
  t.encode_append(text.substr(begin), &ids);
  return ids;
}

struct Call {
  std::string name;
  std::string arguments;
  int pieces = 0;
  bool ended = false;
};
struct Output {
  std::string reasoning;
  std::string content;
  std::vector<Call> calls;
  std::vector<OutputEvent> events;
  bool closed = false;
};

inline void add_up(std::vector<OutputEvent> events, Output* out) {
  for (OutputEvent& e : events) {
    switch (e.kind) {
      case OutputEvent::Kind::kReasoning:
        out->reasoning += e.text;
        break;
      case OutputEvent::Kind::kContent:
        out->content += e.text;
        break;
      case OutputEvent::Kind::kToolCallBegin:
        EXPECT_EQ(e.index, static_cast<int>(out->calls.size()));
        out->calls.push_back({e.text, "", 0, false});
        break;
      case OutputEvent::Kind::kToolCallArgs:
        ASSERT_LT(static_cast<size_t>(e.index), out->calls.size());
        ASSERT_FALSE(out->calls[e.index].ended);
        out->calls[e.index].arguments += e.text;
        ++out->calls[e.index].pieces;
        break;
      case OutputEvent::Kind::kToolCallEnd:
        ASSERT_LT(static_cast<size_t>(e.index), out->calls.size());
        ASSERT_FALSE(out->calls[e.index].ended);
        out->calls[e.index].ended = true;
        break;
    }
    out->events.push_back(std::move(e));
  }
}

// Runs ids through a parser and checks what must hold of every output: calls ended, their arguments
// JSON objects, all text valid UTF-8.
inline Output parse_ids(const TokenizerPtr& t, const std::vector<int32_t>& ids, bool thinking) {
  OutputParser parser(t, thinking);
  Output out;
  for (const int32_t id : ids) add_up(parser.push(id), &out);
  add_up(parser.finish(), &out);
  EXPECT_TRUE(parser.finish().empty());
  EXPECT_EQ(parser.num_tool_calls(), static_cast<int>(out.calls.size()));
  out.closed = parser.message_closed();
  for (const Call& call : out.calls) {
    EXPECT_TRUE(call.ended) << call.name;
    const json arguments = json::parse(call.arguments, nullptr, false);
    EXPECT_TRUE(arguments.is_object()) << call.arguments;
  }
  return out;
}
inline Output parse_script(std::string_view text, bool thinking = true) {
  return parse_ids(nano(), script(*nano(), text), thinking);
}

}  // namespace k3::test
