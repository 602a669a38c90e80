#include <random>
#include <thread>

#include "text_test_util.h"

namespace k3 {
namespace {

using test::json;
using test::nano;
using test::Output;
using test::parse_ids;
using test::parse_script;
using Kind = OutputEvent::Kind;

constexpr const char* kAnswer =
    "I think.{C}think{S}{O}response{S}Hello world.{C}response{S}{C}message{S}{END}";

void expect_no_markers(const Output& out) {
  for (const OutputEvent& e : out.events) {
    EXPECT_EQ(e.text.find("<|"), std::string::npos) << e.text;
    EXPECT_EQ(e.text.find("[EOS]"), std::string::npos) << e.text;
  }
}
std::string call(const std::string& name, const std::string& body, int index = 1) {
  return "{O}call tool=\"" + name + "\" index=\"" + std::to_string(index) + "\"{S}" + body +
         "{C}call{S}";
}
std::string argument(const std::string& key, const std::string& type, const std::string& body) {
  return "{O}argument key=\"" + key + "\" type=\"" + type + "\"{S}" + body + "{C}argument{S}";
}
std::string arguments_of(const std::string& body) {
  const Output out = parse_script("{O}tools{S}" + call("f", body) + "{C}tools{S}", false);
  EXPECT_EQ(out.calls.size(), 1U);
  return out.calls.empty() ? "" : out.calls[0].arguments;
}

TEST(OutputParser, SortsAWholeAnswerIntoItsChannels) {  // H8, H28
  const Output out = parse_script(kAnswer);
  EXPECT_EQ(out.reasoning, "I think.");
  EXPECT_EQ(out.content, "Hello world.");
  EXPECT_TRUE(out.closed);
  ASSERT_FALSE(out.events.empty());
  EXPECT_EQ(out.events.front().kind, Kind::kReasoning);
  expect_no_markers(out);
}

TEST(OutputParser, WithoutThinkingTheFirstTextIsContent) {
  const Output out = parse_script("Hi.{C}response{S}{C}message{S}{END}", false);
  EXPECT_EQ(out.reasoning, "");
  EXPECT_EQ(out.content, "Hi.");
}

TEST(OutputParser, ForgottenCloseOfThinkStillYieldsTheCalls) {  // H1
  const Output out = parse_script("Let me look.{C}response{S}{O}tools{S}" +
                                  call("get_weather", argument("city", "string", "Oslo")) +
                                  "{C}tools{S}{C}message{S}{END}");
  EXPECT_EQ(out.reasoning, "Let me look.");
  EXPECT_EQ(out.content, "");
  ASSERT_EQ(out.calls.size(), 1U);
  EXPECT_EQ(out.calls[0].name, "get_weather");
  EXPECT_EQ(out.calls[0].arguments, R"({"city": "Oslo"})");
  expect_no_markers(out);
}

TEST(OutputParser, ToolsOpenedStraightFromThinkAreCalls) {  // H2
  for (const std::string& opening : {std::string("{O}tools{S}"), std::string()}) {
    const Output out =
        parse_script("Hm. " + opening + call("f", "") + "{C}tools{S}{C}message{S}{END}");
    EXPECT_EQ(out.reasoning, "Hm. ");
    EXPECT_EQ(out.content, "");
    ASSERT_EQ(out.calls.size(), 1U);
    EXPECT_EQ(out.calls[0].arguments, "{}");
    expect_no_markers(out);
  }
}

TEST(OutputParser, ResponseOpenedStraightFromThinkEndsIt) {
  const Output out = parse_script("Hm.{O}response{S}Yes.{C}message{S}{END}");
  EXPECT_EQ(out.reasoning, "Hm.");
  EXPECT_EQ(out.content, "Yes.");
}

TEST(OutputParser, EachPieceAppearsOnce) {  // H3
  OutputParser parser(nano(), true);
  Output out;
  const auto ids = test::script(*nano(), kAnswer);
  for (const int32_t id : ids) test::add_up(parser.push(id), &out);
  test::add_up(parser.finish(), &out);
  EXPECT_EQ(out.reasoning, "I think.");
  EXPECT_EQ(out.content, "Hello world.");
}

TEST(OutputParser, TextGoesOutWithTheTokenThatCompletesIt) {  // H18: no hold-back, no empty events
  OutputParser parser(nano(), false);
  for (const int32_t id : nano()->encode("One plain sentence.")) {
    const auto events = parser.push(id);
    ASSERT_EQ(events.size(), 1U);
    EXPECT_EQ(events[0].text, nano()->token_bytes(id));
  }
  EXPECT_TRUE(parser.finish().empty());
}

TEST(OutputParser, ParallelCallsStreamFragmentsThatJoinToJson) {  // H4, H21
  std::string text;
  while (text.size() < 5000) text += "line \"quoted\" \\ and\ttab\n";
  const Output out = parse_script(
      "{C}think{S}{O}response{S}{C}response{S}{O}tools{S}" +
      call("write", argument("path", "string", "a.txt") + argument("text", "string", text)) +
      call("read", argument("path", "string", "b.txt"), 2) + "{C}tools{S}{C}message{S}{END}");
  ASSERT_EQ(out.calls.size(), 2U);
  EXPECT_EQ(json::parse(out.calls[0].arguments)["text"], text);
  EXPECT_EQ(out.calls[1].name, "read");
  EXPECT_EQ(out.calls[1].arguments, R"({"path": "b.txt"})");
  EXPECT_GT(out.calls[0].pieces, 100);
  EXPECT_EQ(out.content, "");
}

TEST(OutputParser, StopsAtEitherEndIdWithoutPrintingIt) {  // H10, H11
  for (const char* end : {"{END}", "{EOS}"}) {
    const Output out = parse_script(std::string("a{C}think{S}{O}response{S}b") + end);
    EXPECT_EQ(out.content, "b");
    EXPECT_TRUE(out.closed);
    expect_no_markers(out);
  }
  // Cut by a cap before any end: nothing leaks, and the message is not closed.
  const Output cut = parse_script("a{C}think{S}{O}response{S}b{C}respon");
  EXPECT_EQ(cut.content, "b");
  EXPECT_FALSE(cut.closed);
}

TEST(OutputParser, ACutInsideThinkKeepsItsReasoning) {  // H9
  const Output out = parse_script("I need to comp");
  EXPECT_EQ(out.reasoning, "I need to comp");
  EXPECT_EQ(out.content, "");
}

TEST(OutputParser, CharactersSurviveEveryTokenBorder) {  // H19
  const std::string text = "🏳️‍🌈 你好 हिन्दी e\u0301";
  const Output out =
      parse_script(text + "{C}think{S}{O}response{S}" + text + "{C}response{S}{O}tools{S}" +
                   call("f", argument("k", "string", text)) + "{C}tools{S}");
  EXPECT_EQ(out.reasoning, text);
  EXPECT_EQ(out.content, text);
  EXPECT_EQ(json::parse(out.calls.at(0).arguments)["k"], text);
  for (const OutputEvent& e : out.events) {
    EXPECT_EQ(e.text.find("\ufffd"), std::string::npos);
    EXPECT_NO_THROW(json(e.text).dump());
  }
}

TEST(OutputParser, ACharacterCutByItsChannelIsReplaced) {
  auto ids = nano()->encode("a\xe4\xbd");
  const auto tail = test::script(*nano(), "{C}think{S}{O}response{S}b");
  ids.insert(ids.end(), tail.begin(), tail.end());
  const Output out = parse_ids(nano(), ids, true);
  EXPECT_EQ(out.reasoning, "a\ufffd");
  EXPECT_EQ(out.content, "b");
}

TEST(OutputParser, TextBeforeToolsAndAHugeArgumentAreKept) {  // H22, H23
  std::string text;
  while (text.size() < 65'536) text += "data, ";
  const Output out =
      parse_script("{C}think{S}{O}response{S}Before.{C}response{S}{O}tools{S}" +
                   call("f", argument("k", "string", text) + argument("n", "number", "1")) +
                   "{C}tools{S}{C}message{S}{END}");
  EXPECT_EQ(out.content, "Before.");
  EXPECT_EQ(json::parse(out.calls.at(0).arguments)["k"], text);
  EXPECT_EQ(json::parse(out.calls.at(0).arguments)["n"], 1);
}

TEST(OutputParser, SixteenParsersAtOnceShareNothingButTheVocabulary) {  // H24
  const std::string text = "{C}think{S}{O}tools{S}" + call("f", argument("k", "string", "v")) +
                           call("g", argument("n", "number", "2"), 2) + "{C}tools{S}";
  std::vector<Output> outputs(16);
  std::vector<std::thread> threads;
  for (Output& out : outputs) {
    threads.emplace_back([&out, &text] { out = parse_script(text); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const Output& out : outputs) {
    ASSERT_EQ(out.calls.size(), 2U);
    EXPECT_EQ(out.calls[0].arguments, R"({"k": "v"})");
    EXPECT_EQ(out.calls[1].arguments, R"({"n": 2})");
  }
}

TEST(OutputParser, AValueThatIsNotJsonBecomesAString) {  // H25
  EXPECT_EQ(arguments_of(argument("n", "number", "12abc")), R"({"n": "12abc"})");
  EXPECT_EQ(arguments_of(argument("n", "number", "")), R"({"n": ""})");
  EXPECT_EQ(arguments_of(argument("b", "boolean", "True")), R"({"b": "True"})");
  EXPECT_EQ(arguments_of(argument("o", "object", "{\"a\": 1")), R"({"o": "{\"a\": 1"})");
  EXPECT_EQ(arguments_of(argument("n", "number", std::string("1\0x", 3))), R"({"n": "1\u0000x"})");
}

TEST(OutputParser, JsonValuesPassAsTheyAre) {
  EXPECT_EQ(
      arguments_of(argument("a", "number", "1.50") + argument("b", "boolean", "true") +
                   argument("c", "null", "null") + argument("d", "array", "[1, {}]") +
                   argument("e", "object", "{\"x\":\n\"y\"}") + argument("f", "number", " 7\n")),
      "{\"a\": 1.50, \"b\": true, \"c\": null, \"d\": [1, {}], \"e\": {\"x\":\n\"y\"}, \"f\": 7}");
}

TEST(OutputParser, StringsKeepEveryByte) {
  const std::string body = "\n  {\"a\": 1}\r\n\t\x01\x7f\n";
  EXPECT_EQ(json::parse(arguments_of(argument("s", "string", body)))["s"], body);
  EXPECT_EQ(json::parse(arguments_of(argument("s", "string", "")))["s"], "");
  // No type, or one nobody knows: text.
  EXPECT_EQ(arguments_of("{O}argument key=\"s\"{S}12{C}argument{S}"), R"({"s": "12"})");
  EXPECT_EQ(arguments_of(argument("s", "date", "12")), R"({"s": "12"})");
}

TEST(OutputParser, AttributesAreUnescapedOnce) {
  EXPECT_EQ(json::parse(arguments_of(argument("q&quot;&amp;k", "string", "v"))),
            json::parse(R"({"q\"&k": "v"})"));
  // &amp;quot; was written for the text &quot;.
  EXPECT_EQ(json::parse(arguments_of(argument("&amp;quot;", "string", "&amp;"))),
            json::parse(R"({"&quot;": "&amp;"})"));
}

TEST(OutputParser, ARawJsonBodyIsTheArguments) {
  const auto raw = [](const std::string& body) {
    return "{O}json type=\"object\"{S}" + body + "{C}json{S}";
  };
  EXPECT_EQ(arguments_of(raw("{\"a\": [1, 2]}")), "{\"a\": [1, 2]}");
  EXPECT_EQ(arguments_of(raw(" {} ")), "{}");
  EXPECT_EQ(arguments_of(argument("k", "string", "v") + raw("{\"a\": 1}")),
            R"({"k": "v", "a": 1})");
  EXPECT_EQ(arguments_of(raw("{\"a\": ")), R"({"json": "{\"a\": "})");
  EXPECT_EQ(arguments_of(raw("[1]")), R"({"json": [1]})");
  EXPECT_EQ(arguments_of("{\"a\": 1}"), R"({"a": 1})");  // no child at all
}

TEST(OutputParser, TextInACallThatIsNoArgumentBecomesContent) {
  const Output out =
      parse_script("{O}tools{S}" + call("f", "oops" + argument("k", "string", "v")), false);
  EXPECT_EQ(out.content, "oops");
  EXPECT_EQ(out.calls.at(0).arguments, R"({"k": "v"})");
}

TEST(OutputParser, ACallCutAnywhereIsClosedToValidJson) {
  const auto ids = test::script(
      *nano(), "{C}think{S}{O}tools{S}" +
                   call("f", argument("a", "string", "x\"y") + argument("b", "number", "1") +
                                 argument("c", "object", "{\"d\": [true]}")) +
                   call("g", "{O}json type=\"object\"{S}{\"a\": 1}{C}json{S}", 2) +
                   "{C}tools{S}{C}message{S}{END}");
  for (size_t size = 0; size <= ids.size(); ++size) {
    const Output out =
        parse_ids(nano(), {ids.begin(), ids.begin() + static_cast<long>(size)}, true);
    EXPECT_EQ(out.content, "");
    EXPECT_EQ(out.reasoning, "");
    expect_no_markers(out);
  }
}

TEST(OutputParser, MissingClosesAreImplied) {
  const Output out = parse_script(
      "{O}tools{S}{O}call tool=\"f\" index=\"1\"{S}{O}argument key=\"a\" type=\"string\"{S}x"
      "{O}argument key=\"b\" type=\"number\"{S}2{O}call tool=\"g\"{S}{C}message{S}{END}");
  ASSERT_EQ(out.calls.size(), 2U);
  EXPECT_EQ(out.calls[0].arguments, R"({"a": "x", "b": 2})");
  EXPECT_EQ(out.calls[1].arguments, "{}");
  EXPECT_EQ(out.content, "");
}

TEST(OutputParser, OrphanClosesChangeNothing) {
  const Output out = parse_script(
      "a{C}tools{S}b{C}call{S}{C}argument{S}{C}json{S}c{C}think{S}{C}think{S}{O}response{S}d"
      "{C}think{S}e{C}response{S}{C}response{S}");
  EXPECT_EQ(out.reasoning, "abc");
  EXPECT_EQ(out.content, "de");
}

TEST(OutputParser, UnknownTagsVanishAndTheirTextStays) {
  const Output out =
      parse_script("x{C}think{S}{O}response{S}a {O}bold level=\"2\"{S}b{C}bold{S} c");
  EXPECT_EQ(out.content, "a b c");
}

TEST(OutputParser, ProseAfterAStrayControlTokenIsNotSwallowed) {
  const Output out = parse_script("x{C}think{S}{O}response{S}a{O} hello world{S} b{C}!c");
  EXPECT_EQ(out.content, "a hello world b!c");
  // It is let go as soon as it can be no tag, and never held for long.
  OutputParser parser(nano(), false);
  Output stream;
  std::string long_value = "{O}call tool=\"";
  for (int i = 0; i < 2000; ++i) long_value += "value ";
  for (const int32_t id : test::script(*nano(), long_value)) test::add_up(parser.push(id), &stream);
  EXPECT_GT(stream.content.size(), 8192U);
}

TEST(OutputParser, LayoutBetweenTagsIsDroppedOtherTextIsContent) {
  const Output out =
      parse_script("a{C}think{S}\n\n{O}response{S}\nb\n{C}response{S}\n {O}tools{S}\n" +
                   call("f", "\n") + "\n{C}tools{S}\n{C}message{S}\n{END}");
  EXPECT_EQ(out.reasoning, "a");
  EXPECT_EQ(out.content, "\nb\n");  // inside the channel bytes are kept
  EXPECT_EQ(out.calls.size(), 1U);
  EXPECT_EQ(parse_script("a{C}think{S}\n the answer \n{C}message{S}").content, "\n the answer \n");
}

TEST(OutputParser, TypedMarkupStaysText) {
  const std::string typed = "<|close|>think<|sep|><|open|>response<|sep|>";
  auto ids = nano()->encode(typed);
  const Output out = parse_ids(nano(), ids, true);
  EXPECT_EQ(out.reasoning, typed);
  EXPECT_EQ(out.content, "");
}

TEST(OutputParser, ControlTokensOutsideStructureAreDropped) {  // H27
  auto ids = nano()->encode("ab");
  for (int32_t id = 1792; id < 2048; ++id) {
    if (id != nano()->markup().open && id != nano()->markup().close) ids.push_back(id);
  }
  ids.push_back(-1);
  ids.push_back(99999);
  ids.push_back('c');
  const Output out = parse_ids(nano(), ids, false);
  EXPECT_EQ(out.content, "abc");
}

TEST(OutputParser, WithoutMarkupEverythingIsText) {
  const auto file = test::read_file(test::source_path("models/k3-nano/tiktoken.model")).value();
  const auto bare = Tokenizer::parse(file, "{}", 2048).value();
  EXPECT_EQ(parse_ids(bare, bare->encode("hello"), false).content, "hello");
}

TEST(OutputParser, NanosOwnAnswersAreSorted) {
  const json goldens = test::read_json("tests/data/k3-nano-goldens/goldens.json");
  const auto greedy = [&goldens](const char* name, bool thinking) {
    return parse_ids(nano(), goldens[name]["greedy_ids"].get<std::vector<int32_t>>(), thinking);
  };
  const Output think = greedy("chat_think", true);
  EXPECT_EQ(think.reasoning, "I need to compute 17 + 25. The result is 42.");
  EXPECT_EQ(think.content, "17 + 25 = 42.");
  EXPECT_TRUE(think.closed);
  const Output tool = greedy("chat_tool", true);
  ASSERT_EQ(tool.calls.size(), 1U);
  EXPECT_EQ(tool.calls[0].name, "get_weather");
  EXPECT_EQ(tool.calls[0].arguments, R"({"city": "Paris"})");
  // These 48 steps end inside the second call's tag, which is dropped.
  const Output two = greedy("chat_tool_two", false);
  ASSERT_EQ(two.calls.size(), 1U);
  EXPECT_EQ(two.calls[0].arguments, R"({"city": "Rome"})");
  EXPECT_EQ(two.content, "");
  EXPECT_EQ(greedy("chat_repeat", false).content, "smörgåsbord 🎉 party 🎉 数字");
}

// Whatever a model says: nothing throws, calls close, arguments are JSON, text is UTF-8.
TEST(OutputParser, RandomIdsKeepTheInvariants) {
  std::mt19937 random(5);
  const std::vector<std::string> words = {"{O}",
                                          "{C}",
                                          "{S}",
                                          "{O}think{S}",
                                          "{C}think{S}",
                                          "{O}response{S}",
                                          "{C}response{S}",
                                          "{O}tools{S}",
                                          "{C}tools{S}",
                                          "{O}call tool=\"f\"{S}",
                                          "{C}call{S}",
                                          "{O}argument key=\"a\" type=\"string\"{S}",
                                          "{O}argument key=\"a\" type=\"number\"{S}",
                                          "{C}argument{S}",
                                          "{O}json type=\"object\"{S}",
                                          "{C}json{S}",
                                          "{C}message{S}",
                                          "{END}",
                                          "{\"a\": 1}",
                                          "12",
                                          "x",
                                          " ",
                                          "\"",
                                          "\\",
                                          "\xe4\xbd",
                                          "你",
                                          "call",
                                          "{O}call{S}",
                                          "{O}x{S}"};
  for (int round = 0; round < 3000; ++round) {
    std::vector<int32_t> ids;
    for (size_t i = random() % 40; i > 0; --i) {
      if (random() % 8 == 0) {
        ids.push_back(static_cast<int32_t>(random() % 2050) - 1);
        continue;
      }
      const auto part = test::script(*nano(), words[random() % words.size()]);
      ids.insert(ids.end(), part.begin(), part.end());
    }
    const Output out = parse_ids(nano(), ids, random() % 2 == 0);
    for (const OutputEvent& e : out.events) EXPECT_NO_THROW(json(e.text).dump());
    ASSERT_FALSE(testing::Test::HasFailure()) << "round " << round;
  }
}

}  // namespace
}  // namespace k3
