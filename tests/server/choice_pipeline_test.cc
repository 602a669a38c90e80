// The output path under scripted id sequences: the cases of people's bug reports that need forced
// output (H1... are the rows of tests/api/CASES.md).
#include "server/choice_pipeline.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "nano.h"
#include "server/wire.h"

namespace k3 {
namespace {

using testing::ids_of;
using testing::nano_tokenizer;

struct Played {
  std::vector<Delta> deltas;
  ChoiceResult result;
  std::string finish;
  std::vector<LogprobEntry> logprobs;
  bool stopped = false;
  int64_t tokens = 0;

  std::string all_text() const {
    std::string out;
    for (const Delta& d : deltas) out += d.text + "\x01";
    return out;
  }
};

Played play(const std::vector<int32_t>& ids, PipelineOptions options,
            FinishReason reason = FinishReason::kStop) {
  ChoicePipeline pipeline(nano_tokenizer(), options);
  Played out;
  const auto& markup = nano_tokenizer()->markup();
  auto take = [&](std::vector<Delta> deltas) {
    for (Delta& d : deltas) {
      out.result.add(d);
      out.deltas.push_back(std::move(d));
    }
    for (LogprobEntry& e : pipeline.take_logprobs()) out.logprobs.push_back(std::move(e));
  };
  for (int32_t id : ids) {
    TokenOutput token;
    token.token = id;
    token.is_end = id == markup.end_of_msg || id == markup.eos;
    token.chosen = {id, -0.5f, 1};
    take(pipeline.push(token));
    if (pipeline.stopped()) {
      reason = FinishReason::kStop;
      break;
    }
  }
  take(pipeline.finish());
  out.finish = pipeline.finish_reason(reason);
  out.stopped = pipeline.stopped();
  out.tokens = pipeline.tokens();
  for (const Delta& d : out.deltas) {
    EXPECT_FALSE(d.text.empty()) << "an empty delta";
    EXPECT_EQ(d.text.find("<|"), std::string::npos) << "markup in a delta: " << d.text;
  }
  return out;
}

PipelineOptions chat_options(bool thinking = true) {
  PipelineOptions options;
  options.chat = true;
  options.thinking = thinking;
  return options;
}

const std::string kEnd = "<|close|>message<|sep|><|end_of_msg|>";
std::string call(const std::string& tool, int index, const std::string& key,
                 const std::string& type, const std::string& value) {
  return "<|open|>call tool=\"" + tool + "\" index=\"" + std::to_string(index) +
         "\"<|sep|><|open|>argument key=\"" + key + "\" type=\"" + type + "\"<|sep|>" + value +
         "<|close|>argument<|sep|><|close|>call<|sep|>";
}
std::string tools(const std::string& calls) {
  return "<|open|>tools<|sep|>" + calls + "<|close|>tools<|sep|>";
}

TEST(Pipeline, H1_ThinkNeverClosedYetCallsComeOut) {
  const Played p = play(ids_of("I look it up.<|close|>response<|sep|>" +
                               tools(call("get_weather", 1, "city", "string", "Paris")) + kEnd),
                        chat_options());
  ASSERT_EQ(p.result.tool_calls.size(), 1u);
  EXPECT_EQ(p.result.tool_calls[0].arguments, "{\"city\": \"Paris\"}");
  EXPECT_EQ(p.result.reasoning, "I look it up.");
  EXPECT_EQ(p.finish, "tool_calls");
}

TEST(Pipeline, H2_ToolsOpenedStraightFromThinkAreParsed) {
  const Played p =
      play(ids_of("Now." + tools(call("get_weather", 1, "city", "string", "Rome")) + kEnd),
           chat_options());
  ASSERT_EQ(p.result.tool_calls.size(), 1u);
  EXPECT_EQ(p.result.tool_calls[0].name, "get_weather");
  EXPECT_EQ(p.result.tool_calls[0].id, "get_weather:0");
  EXPECT_EQ(p.finish, "tool_calls");
}

TEST(Pipeline, H3_TheAnswerComesOnceAndWithoutMarkers) {
  const Played p = play(ids_of("Hm.<|close|>think<|sep|><|open|>response<|sep|>hello world"
                               "<|close|>response<|sep|>" +
                               kEnd),
                        chat_options());
  EXPECT_EQ(p.result.reasoning, "Hm.");
  EXPECT_EQ(p.result.content, "hello world");
  EXPECT_EQ(p.finish, "stop");
}

TEST(Pipeline, H4_H22_TwoCallsWithLongArgumentsStreamAsValidJson) {
  const std::string five(5 << 10, 'x');
  std::string sixty_four = "line \"one\"\n";
  while (sixty_four.size() < (64 << 10)) sixty_four += "smörgåsbord \\ 🎉\t";
  const Played p = play(
      ids_of("Both.<|close|>think<|sep|><|open|>response<|sep|>Before.<|close|>response<|sep|>" +
             tools(call("write", 1, "text", "string", five) +
                   call("write", 2, "text", "string", sixty_four)) +
             kEnd),
      chat_options());
  ASSERT_EQ(p.result.tool_calls.size(), 2u);
  EXPECT_EQ(p.result.content, "Before.");
  EXPECT_EQ(nlohmann::json::parse(p.result.tool_calls[0].arguments)["text"], five);
  EXPECT_EQ(nlohmann::json::parse(p.result.tool_calls[1].arguments)["text"], sixty_four);
  size_t pieces = 0;
  for (const Delta& d : p.deltas) pieces += d.kind == Delta::Kind::kToolCallArgs ? 1 : 0;
  EXPECT_GT(pieces, 100u) << "arguments should stream, not arrive at once";
}

TEST(Pipeline, H9_ThinkingThatEatsTheBudgetIsReasoningAndLength) {
  const Played p = play(ids_of("I need to compute 17"), chat_options(), FinishReason::kLength);
  EXPECT_EQ(p.finish, "length");
  EXPECT_EQ(p.result.reasoning, "I need to compute 17");
  EXPECT_EQ(p.result.content, "");
}

TEST(Pipeline, H10_H11_AnyEndIdStopsWithoutATraceAndACutIsLength) {
  for (const char* end : {"[EOS]", "<|end_of_msg|>"}) {
    const Played p = play(ids_of(std::string("Paris.") + end), chat_options(false));
    EXPECT_EQ(p.result.content, "Paris.");
    EXPECT_EQ(p.finish, "stop");
  }
  const Played cut =
      play(ids_of("Paris.<|close|>response"), chat_options(false), FinishReason::kLength);
  EXPECT_EQ(cut.finish, "length");
  EXPECT_EQ(cut.result.content.rfind("Paris.", 0), 0u);
}

TEST(Pipeline, H16_StopStringNeverLeaksAByteAcrossTokens) {
  PipelineOptions options;
  options.stop = {"DEFGHIJ"};
  std::vector<int32_t> ids;  // one letter a token: the worst case
  for (char c : std::string("ABCDEFGHIJKLM")) {
    for (int32_t id : nano_tokenizer()->encode(std::string(1, c))) ids.push_back(id);
  }
  const Played p = play(ids, options);
  EXPECT_EQ(p.result.content, "ABC");
  EXPECT_TRUE(p.stopped);
  EXPECT_EQ(p.finish, "stop");
  EXPECT_EQ(p.tokens, 10) << "the tokens after the match are not asked for";
  options.include_stop_str_in_output = true;
  EXPECT_EQ(play(ids, options).result.content, "ABCDEFGHIJ");
}

TEST(Pipeline, H17_H18_AStopStringThatNeverComesChangesNothing) {
  PipelineOptions options;
  options.stop = {"world!!", "zzz"};
  const Played p = play(ids_of("hello world!"), options, FinishReason::kLength);
  EXPECT_EQ(p.result.content, "hello world!");
  EXPECT_EQ(p.finish, "length");
}

TEST(Pipeline, StopStringsApplyToReasoningAndContentButNotToCalls) {
  PipelineOptions options = chat_options();
  options.stop = {"Paris"};
  EXPECT_EQ(play(ids_of("To Paris now"), options).result.reasoning, "To ");
  const Played content =
      play(ids_of("Hm.<|close|>think<|sep|><|open|>response<|sep|>In Paris."), options);
  EXPECT_EQ(content.result.reasoning, "Hm.");
  EXPECT_EQ(content.result.content, "In ");
  const Played calls =
      play(ids_of("Hm." + tools(call("f", 1, "city", "string", "Paris")) + kEnd), options);
  ASSERT_EQ(calls.result.tool_calls.size(), 1u);
  EXPECT_NE(calls.result.tool_calls[0].arguments.find("Paris"), std::string::npos);
}

TEST(Pipeline, AStopStringDoesNotReachAcrossChannels) {
  PipelineOptions options = chat_options();
  options.stop = {"ab"};
  const Played p = play(ids_of("xa<|close|>think<|sep|><|open|>response<|sep|>by" + kEnd), options);
  EXPECT_EQ(p.result.reasoning, "xa");
  EXPECT_EQ(p.result.content, "by");
  EXPECT_FALSE(p.stopped);
}

TEST(Pipeline, StopStringsDoNotCountBeforeMinTokens) {
  PipelineOptions options;
  options.stop = {"b"};
  options.min_tokens = 3;
  std::vector<int32_t> ids;
  for (char c : std::string("abcdbe"))
    ids.push_back(nano_tokenizer()->encode(std::string(1, c))[0]);
  EXPECT_EQ(play(ids, options).result.content, "abcd");
}

TEST(Pipeline, H19_CharactersAreNeverCutAtTokenEdges) {
  const std::string text = "🏳️‍🌈 你好 हिन्दी e\u0301 smörgåsbord 🎉";
  for (bool chat : {false, true}) {
    PipelineOptions options = chat ? chat_options(false) : PipelineOptions{};
    const Played p = play(nano_tokenizer()->encode(text), options);
    EXPECT_EQ(p.result.content, text);
    for (const Delta& d : p.deltas) EXPECT_EQ(d.text.find("\xEF\xBF\xBD"), std::string::npos);
  }
}

TEST(Pipeline, H21_AdjacentCallsStayApart) {
  const Played p = play(
      ids_of(tools(call("a", 1, "x", "number", "1") + call("b", 2, "y", "number", "2")) + kEnd),
      chat_options());
  ASSERT_EQ(p.result.tool_calls.size(), 2u);
  EXPECT_EQ(p.result.tool_calls[0].id, "a:0");
  EXPECT_EQ(p.result.tool_calls[1].id, "b:1");
  EXPECT_EQ(p.result.tool_calls[1].arguments, "{\"y\": 2}");
}

TEST(Pipeline, H25_ABadNumberStillGivesValidJson) {
  const Played p = play(ids_of(tools(call("f", 1, "n", "number", "12abc")) + kEnd), chat_options());
  ASSERT_EQ(p.result.tool_calls.size(), 1u);
  EXPECT_EQ(nlohmann::json::parse(p.result.tool_calls[0].arguments)["n"], "12abc");
}

TEST(Pipeline, H25_ACallCutByTheBudgetStillGivesValidJson) {
  const std::string whole = tools(call("f", 1, "city", "string", "Paris and more")) + kEnd;
  const std::vector<int32_t> ids = ids_of(whole);
  int calls = 0;
  for (size_t cut = 1; cut < ids.size(); ++cut) {
    const Played p = play({ids.begin(), ids.begin() + static_cast<int64_t>(cut)}, chat_options(),
                          FinishReason::kLength);
    EXPECT_EQ(p.finish, "length");
    for (const auto& c : p.result.tool_calls) {
      ++calls;
      EXPECT_TRUE(nlohmann::json::accept(c.arguments)) << c.arguments;
    }
  }
  EXPECT_GT(calls, 5);
}

TEST(Pipeline, H26_UnderToolChoiceNoneCallsAreDropped) {
  PipelineOptions options = chat_options();
  options.return_tools = false;
  const Played p = play(ids_of("Hm." + tools(call("f", 1, "x", "number", "1")) + kEnd), options);
  EXPECT_TRUE(p.result.tool_calls.empty());
  EXPECT_EQ(p.finish, "stop");
}

TEST(Pipeline, H28_WithThinkingTheFirstDeltaIsReasoning) {
  const Played p =
      play(ids_of("Hm.<|close|>think<|sep|><|open|>response<|sep|>Yes." + kEnd), chat_options());
  ASSERT_FALSE(p.deltas.empty());
  EXPECT_EQ(p.deltas[0].kind, Delta::Kind::kReasoning);
}

TEST(Pipeline, AModelThatTalksOnAfterItsMessageIsStopped) {
  const Played p = play(ids_of("Yes.<|close|>response<|sep|><|close|>message<|sep|>and on and on"),
                        chat_options(false));
  EXPECT_EQ(p.result.content, "Yes.");
  EXPECT_TRUE(p.stopped);
  PipelineOptions more = chat_options(false);
  more.min_tokens = 1000;
  const std::vector<int32_t> ids = ids_of("Yes.<|close|>message<|sep|>and on and on");
  const Played longer = play(ids, more);
  EXPECT_FALSE(longer.stopped);
  EXPECT_EQ(longer.tokens, static_cast<int64_t>(ids.size()));
}

TEST(Pipeline, LogprobsCoverTheTextAndNothingBehindAStop) {
  PipelineOptions options;
  options.logprobs = true;
  std::vector<int32_t> ids;
  for (char c : std::string("abcdef"))
    ids.push_back(nano_tokenizer()->encode(std::string(1, c))[0]);
  Played p = play(ids, options);
  ASSERT_EQ(p.logprobs.size(), 6u);
  EXPECT_EQ(p.logprobs[5].text_offset, 5);
  options.stop = {"cd"};
  p = play(ids, options);
  EXPECT_EQ(p.result.content, "ab");
  EXPECT_EQ(p.logprobs.size(), 2u);
}

TEST(Pipeline, LogprobsOfChatLeaveOutMarkupAndCalls) {
  PipelineOptions options = chat_options();
  options.logprobs = true;
  const Played p =
      play(ids_of("Hm.<|close|>think<|sep|><|open|>response<|sep|>Yes.<|close|>response<|sep|>" +
                  tools(call("f", 1, "x", "number", "1")) + kEnd),
           options);
  std::string joined;
  for (const LogprobEntry& e : p.logprobs) joined += token_text(*nano_tokenizer(), e.chosen.token);
  EXPECT_EQ(joined, "Hm.Yes.");
}

TEST(Pipeline, SpecialTokensOfACompletionAreSkippedOrSpelled) {
  PipelineOptions options;
  const std::vector<int32_t> ids = ids_of("a<|open|>b");
  EXPECT_EQ(play(ids, options).result.content, "ab");
  ChoicePipeline spelled(nano_tokenizer(), [] {
    PipelineOptions o;
    o.skip_special_tokens = false;
    return o;
  }());
  std::string text;
  for (int32_t id : ids) {
    TokenOutput token;
    token.token = id;
    for (const Delta& d : spelled.push(token)) text += d.text;
  }
  EXPECT_EQ(text, "a<|open|>b");
}

// --- frames ---

nlohmann::json parse_frame(const std::string& frame) {
  EXPECT_EQ(frame.rfind("data: ", 0), 0u) << frame;
  EXPECT_EQ(frame.substr(frame.size() - 2), "\n\n");
  return nlohmann::json::parse(frame.substr(6), nullptr, false);
}

TEST(Wire, H5_DeltasHaveAbsentKeysRatherThanNulls) {
  const AnswerMeta meta{"chatcmpl-1", "m", 1, true};
  Delta delta{Delta::Kind::kContent, "hi", 0, ""};
  FrameParts parts;
  parts.delta = &delta;
  const auto frame = parse_frame(choice_frame(meta, *nano_tokenizer(), parts));
  EXPECT_EQ(frame["choices"][0]["delta"].dump(), "{\"content\":\"hi\"}");
  EXPECT_TRUE(frame["choices"][0]["finish_reason"].is_null());
  EXPECT_FALSE(frame.contains("usage"));
  FrameParts last;
  Ending ending{"stop", {}};
  last.ending = &ending;
  const auto end = parse_frame(choice_frame(meta, *nano_tokenizer(), last));
  EXPECT_EQ(end["choices"][0]["delta"].dump(), "{}");
  EXPECT_EQ(end["choices"][0]["finish_reason"], "stop");
  EXPECT_EQ(parse_frame(usage_frame(meta, {3, 4}))["choices"].dump(), "[]");
}

TEST(Wire, ToolCallsBeginWithASlotAndGoOnWithPieces) {
  const AnswerMeta meta{"chatcmpl-1", "m", 1, true};
  Delta begin{Delta::Kind::kToolCallBegin, "f", 1, "f:1"};
  FrameParts parts;
  parts.delta = &begin;
  EXPECT_EQ(
      parse_frame(choice_frame(meta, *nano_tokenizer(), parts))["choices"][0]["delta"].dump(),
      R"({"tool_calls":[{"function":{"arguments":"","name":"f"},"id":"f:1","index":1,"type":"function"}]})");
  Delta args{Delta::Kind::kToolCallArgs, "{\"a\"", 1, ""};
  parts.delta = &args;
  EXPECT_EQ(parse_frame(choice_frame(meta, *nano_tokenizer(), parts))["choices"][0]["delta"].dump(),
            R"({"tool_calls":[{"function":{"arguments":"{\"a\""},"index":1}]})");
}

TEST(Wire, TokensThatArePartsOfCharactersAreSpelledByTheirBytes) {
  int partial = 0;
  for (int32_t id : nano_tokenizer()->encode("🎉")) {
    const std::string text = token_text(*nano_tokenizer(), id);
    partial += text.rfind("bytes:\\x", 0) == 0 ? 1 : 0;
    EXPECT_TRUE(nlohmann::json::accept(nlohmann::json(text).dump()));
  }
  if (nano_tokenizer()->encode("🎉").size() > 1) {
    EXPECT_GT(partial, 0);
  }
  EXPECT_EQ(token_text(*nano_tokenizer(), nano_tokenizer()->encode("a")[0]), "a");
}

TEST(Wire, IdsAreThePrefixAndTwentyFourHexDigits) {
  const std::string id = random_id("chatcmpl-");
  EXPECT_EQ(id.size(), 9u + 24u);
  EXPECT_EQ(id.find_first_not_of("0123456789abcdef", 9), std::string::npos);
  EXPECT_NE(id, random_id("chatcmpl-"));
}

}  // namespace
}  // namespace k3
