// Request bodies: every field's good and bad values, by table.
#include "server/schema.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "server/json_body.h"

namespace k3 {
namespace {

using Json = nlohmann::ordered_json;

const SchemaContext kContext{2048, {0.7f, 0.95f, 0, 0.0f, 1.0f}};

std::optional<ApiError> completion(const std::string& fields, CompletionBody* out) {
  Json body;
  if (auto error = parse_json_body(fields, &body)) return error;
  return parse_completion_body(body, kContext, out);
}

std::optional<ApiError> chat(const std::string& fields, ChatBody* out) {
  Json body;
  if (auto error = parse_json_body(fields, &body)) return error;
  return parse_chat_body(body, kContext, out);
}

std::string with_prompt(const std::string& field, const std::string& value) {
  return R"({"prompt":"x",")" + field + "\":" + value + "}";
}
std::string with_messages(const std::string& field, const std::string& value) {
  return R"({"messages":[{"role":"user","content":"x"}],")" + field + "\":" + value + "}";
}

struct Case {
  const char* field;
  std::vector<const char*> good, bad;
};

// What both endpoints share.
const std::vector<Case>& common_cases() {
  static const std::vector<Case> cases = {
      {"model", {"\"m\"", "null"}, {"1", "[]", "{}", "true"}},
      {"temperature",
       {"0", "1", "2.0", "0.5", "null"},
       {"-0.1", "2.1", "1e300", "\"1\"", "true", "[]", "-1", "18446744073709551615"}},
      {"top_p", {"1", "0.01"}, {"0", "-1", "1.01", "\"x\"", "false"}},
      {"top_k",
       {"-1", "0", "40", "2147483647"},
       {"-2", "1.5", "5.0", "\"5\"", "2147483648", "9223372036854775808", "1e3"}},
      {"min_p", {"0", "1", "0.3"}, {"-0.01", "1.2", "\"0\""}},
      {"presence_penalty", {"-2", "2", "0"}, {"-2.01", "3", "\"1\"", "true"}},
      {"frequency_penalty", {"-2", "2", "0"}, {"-2.01", "3", "\"1\"", "{}"}},
      {"repetition_penalty", {"1", "1.3", "0.5"}, {"0", "-1", "\"1\""}},
      {"logit_bias",
       {"null", "{}", R"({"5":-100,"6":100.0})"},
       {"[]", "\"5\"", R"({"-1":1})", R"({"2048":1})", R"({"x":1})", R"({"":1})", R"({"5":101})",
        R"({"5":-100.5})", R"({"5":"1"})", R"({"5":1,"05":2})", R"({"99999999999":1})",
        R"({"5":null})", R"({"1.5":1})"}},
      {"seed",
       {"0", "-1", "9223372036854775807", "-9223372036854775808"},
       {"9223372036854775808", "1.5", "\"1\"", "true", "1e30"}},
      {"n", {"1", "128"}, {"0", "-1", "129", "1.0", "\"1\"", "1000000000", "9223372036854775808"}},
      {"max_tokens",
       {"1", "9223372036854775807"},
       {"0", "-5", "1.5", "16.0", "\"16\"", "9223372036854775808", "1e9", "true", "[16]"}},
      {"min_tokens", {"0", "3"}, {"-1", "0.5", "\"1\""}},
      {"stop",
       {"null", "\"a\"", "[]", R"(["a","b"])"},
       {"\"\"", R"(["a",""])", "5", "[5]", "{}", R"([null])",
        R"(["1","2","3","4","5","6","7","8","9","a","b","c","d","e","f","g","h"])"}},
      {"stop_token_ids", {"[]", "[0,2047]"}, {"[2048]", "[-1]", "[1.0]", "[\"1\"]", "5", "{}"}},
      {"include_stop_str_in_output", {"true", "false"}, {"1", "\"true\"", "[]"}},
      {"ignore_eos", {"true", "false"}, {"0", "\"no\""}},
      {"stream", {"true", "false", "null"}, {"1", "\"true\""}},
      {"best_of", {"1", "null"}, {"2", "0", "\"1\"", "1.5"}},
      {"service_tier", {"\"auto\"", "\"default\"", "null"}, {"\"flex\"", "1"}},
      {"priority", {"0"}, {"1", "\"high\""}},
      {"use_beam_search", {"false"}, {"true"}},
      {"prompt_logprobs", {"null"}, {"0", "1"}},
      {"truncate_prompt_tokens", {"null"}, {"10"}},
      {"allowed_token_ids", {"null"}, {"[1]"}},
      {"bad_words", {"null"}, {"[\"x\"]"}},
      {"guided_json", {"null"}, {"{}"}},
      {"guided_regex", {"null"}, {"\"a*\""}},
      {"guided_choice", {"null"}, {"[\"a\"]"}},
      {"guided_grammar", {"null"}, {"\"g\""}},
      {"structured_outputs", {"null"}, {"{}"}},
      {"user", {"\"u\""}, {}},
      {"metadata", {"{}"}, {}},
      {"store", {"true"}, {}},
      {"no_such_field", {}, {"1", "null", "{}"}},
  };
  return cases;
}

TEST(Schema, EveryCommonFieldTakesItsGoodValuesAndNamesItselfInTheErrorOfABadOne) {
  for (const Case& c : common_cases()) {
    for (const char* value : c.good) {
      CompletionBody a;
      auto error = completion(with_prompt(c.field, value), &a);
      EXPECT_FALSE(error) << c.field << "=" << value << ": " << (error ? error->message : "");
      ChatBody b;
      error = chat(with_messages(c.field, value), &b);
      EXPECT_FALSE(error) << c.field << "=" << value << ": " << (error ? error->message : "");
    }
    for (const char* value : c.bad) {
      CompletionBody a;
      ChatBody b;
      for (const auto& error :
           {completion(with_prompt(c.field, value), &a), chat(with_messages(c.field, value), &b)}) {
        ASSERT_TRUE(error) << c.field << "=" << value << " was accepted";
        EXPECT_EQ(error->http_status, 400);
        EXPECT_NE(error->message.find(c.field), std::string::npos) << error->message;
        EXPECT_EQ(error->param.rfind(c.field, 0), 0u) << error->param;
      }
    }
  }
}

TEST(Schema, CompletionFieldsOfTheirOwn) {
  const std::vector<Case> cases = {
      {"logprobs", {"null", "0", "20"}, {"21", "-1", "true", "\"1\"", "1.0"}},
      {"echo", {"true", "false"}, {"1", "\"x\""}},
      {"suffix", {"null"}, {"\"\"", "\"x\""}},
      {"skip_special_tokens", {"true", "false"}, {"0"}},
      {"response_format", {"null", R"({"type":"text"})"}, {R"({"type":"json_object"})"}},
      {"messages", {}, {"[]"}},
      {"tools", {}, {"[]"}},
      {"max_completion_tokens", {}, {"5"}},
      {"top_logprobs", {}, {"1"}},
  };
  for (const Case& c : cases) {
    for (const char* value : c.good) {
      CompletionBody out;
      const auto error = completion(with_prompt(c.field, value), &out);
      EXPECT_FALSE(error) << c.field << "=" << value << ": " << (error ? error->message : "");
    }
    for (const char* value : c.bad) {
      CompletionBody out;
      const auto error = completion(with_prompt(c.field, value), &out);
      ASSERT_TRUE(error) << c.field << "=" << value << " was accepted";
      EXPECT_EQ(error->param, c.field);
    }
  }
}

TEST(Schema, ChatFieldsOfTheirOwn) {
  const std::vector<Case> cases = {
      {"logprobs", {"null", "true", "false"}, {"1", "\"true\""}},
      {"top_logprobs", {"null"}, {"1", "21", "\"1\""}},  // without logprobs: true
      {"max_completion_tokens", {"1", "100"}, {"0", "1.5", "\"1\"", "9223372036854775808"}},
      {"parallel_tool_calls", {"true", "null"}, {"false", "1"}},
      {"skip_special_tokens", {"true"}, {"false"}},
      {"add_generation_prompt", {"true"}, {"false"}},
      {"continue_final_message", {"false"}, {"true"}},
      {"modalities", {R"(["text"])"}, {R"(["text","audio"])", "[]"}},
      {"functions", {"null"}, {"[]"}},
      {"function_call", {"null"}, {"\"auto\""}},
      {"audio", {"null"}, {"{}"}},
      {"prediction", {"null"}, {"{}"}},
      {"web_search_options", {"null"}, {"{}"}},
      {"chat_template", {"null"}, {"\"x\""}},
      {"documents", {"null", "[]"}, {"[{}]"}},
      {"echo", {"false"}, {"true"}},
      {"suffix", {}, {"\"x\""}},
      {"prompt", {}, {"\"x\""}},
      {"reasoning_effort", {"\"low\"", "\"high\"", "\"max\"", "null"}, {"\"huge\"", "5"}},
      {"thinking", {"true", "false", R"({"type":"disabled"})"}, {"5", R"({"type":"x"})"}},
      {"tool_choice",
       {"\"auto\"", "\"none\""},
       {"\"required\"", "\"x\"", "5", R"({"type":"function","function":{"name":"f"}})"}},
      {"response_format",
       {R"({"type":"text"})", R"({"type":"json_object"})"},
       {R"({"type":"x"})", "5"}},
      {"chat_template_kwargs", {R"({"thinking":false})"}, {R"({"nope":1})", "5"}},
  };
  for (const Case& c : cases) {
    for (const char* value : c.good) {
      ChatBody out;
      const auto error = chat(with_messages(c.field, value), &out);
      EXPECT_FALSE(error) << c.field << "=" << value << ": " << (error ? error->message : "");
    }
    for (const char* value : c.bad) {
      ChatBody out;
      const auto error = chat(with_messages(c.field, value), &out);
      ASSERT_TRUE(error) << c.field << "=" << value << " was accepted";
      EXPECT_EQ(error->http_status, 400);
      EXPECT_NE(error->message.find(c.field), std::string::npos) << error->message;
    }
  }
}

TEST(Schema, PromptsOfEveryShapeAreReadAndEmptyOnesRefused) {
  const struct {
    const char* prompt;
    size_t count;
  } good[] = {{"\"a\"", 1},          {R"(["a","b"])", 2}, {"[1,2,3]", 1}, {"[[1,2],[3]]", 2},
              {R"(["a",[1,2]])", 2}, {R"([[1],"a"])", 2}, {"[0]", 1},     {"[2047]", 1}};
  for (const auto& c : good) {
    CompletionBody out;
    const auto error = completion(std::string("{\"prompt\":") + c.prompt + "}", &out);
    EXPECT_FALSE(error) << c.prompt << ": " << (error ? error->message : "");
    EXPECT_EQ(out.prompts.size(), c.count) << c.prompt;
  }
  const struct {
    const char* prompt;
    const char* param;
  } bad[] = {{"\"\"", "prompt"},         {"[]", "prompt"},
             {"[[]]", "prompt[0]"},      {R"(["a",""])", "prompt[1]"},
             {"null", "prompt"},         {"5", "prompt"},
             {"{}", "prompt"},           {"[2048]", "prompt[0]"},
             {"[1,-1]", "prompt[1]"},    {"[1,1.5]", "prompt[1]"},
             {"[1,\"a\"]", "prompt[1]"}, {"[[1],[1,2048]]", "prompt[1][1]"},
             {"[\"a\",5]", "prompt[1]"}, {"[1,18446744073709551615]", "prompt[1]"},
             {"[null]", "prompt[0]"},    {"[true]", "prompt[0]"},
             {"[[[1]]]", "prompt[0][0]"}};
  for (const auto& c : bad) {
    CompletionBody out;
    const auto error = completion(std::string("{\"prompt\":") + c.prompt + "}", &out);
    ASSERT_TRUE(error) << c.prompt << " was accepted";
    EXPECT_EQ(error->param, c.param) << error->message;
    EXPECT_EQ(error->http_status, 400);
  }
  CompletionBody out;
  EXPECT_EQ(completion("{}", &out)->param, "prompt");
}

TEST(Schema, FieldsThatContradictEachOtherAreRefused) {
  CompletionBody c;
  EXPECT_EQ(completion(R"({"prompt":"x","echo":true,"logprobs":1})", &c)->param, "echo");
  EXPECT_EQ(completion(R"({"prompt":"x","min_tokens":9,"max_tokens":8})", &c)->param, "min_tokens");
  EXPECT_EQ(completion(R"({"prompt":"x","stream_options":{"include_usage":true}})", &c)->param,
            "stream_options");
  EXPECT_EQ(completion(R"({"prompt":["a","b","c"],"n":100})", &c)->param, "n");
  ChatBody b;
  EXPECT_EQ(chat(R"({"messages":[{"role":"user","content":"x"}],"max_tokens":5,
                     "max_completion_tokens":6})",
                 &b)
                ->param,
            "max_completion_tokens");
  ChatBody equal;
  EXPECT_FALSE(chat(R"({"messages":[{"role":"user","content":"x"}],"max_tokens":6,
                        "max_completion_tokens":6})",
                    &equal));
  EXPECT_EQ(equal.common.max_tokens, 6);
}

TEST(Schema, StreamOptionsAreReadAndTheirUnknownMembersNamed) {
  CompletionBody out;
  ASSERT_FALSE(completion(R"({"prompt":"x","stream":true,"stream_options":
      {"include_usage":true,"continuous_usage_stats":true,"include_obfuscation":false}})",
                          &out));
  EXPECT_TRUE(out.common.include_usage);
  EXPECT_TRUE(out.common.continuous_usage_stats);
  CompletionBody other;
  EXPECT_EQ(
      completion(R"({"prompt":"x","stream":true,"stream_options":{"nope":1}})", &other)->param,
      "stream_options.nope");
}

TEST(Schema, UnknownFieldsAreAllListed) {
  CompletionBody out;
  const auto error = completion(R"({"prompt":"x","alpha":1,"beta":null})", &out);
  ASSERT_TRUE(error);
  EXPECT_NE(error->message.find("alpha, beta"), std::string::npos) << error->message;
  EXPECT_EQ(error->code, "unknown_parameter");
}

TEST(Schema, LeftOutFieldsComeFromTheGenerationConfig) {
  CompletionBody out;
  ASSERT_FALSE(completion(R"({"prompt":"x"})", &out));
  EXPECT_FLOAT_EQ(out.common.sampling.temperature, 0.7f);
  EXPECT_FLOAT_EQ(out.common.sampling.top_p, 0.95f);
  CompletionBody set;
  ASSERT_FALSE(completion(R"({"prompt":"x","temperature":0,"top_p":1})", &set));
  EXPECT_FLOAT_EQ(set.common.sampling.temperature, 0.0f);
  EXPECT_FLOAT_EQ(set.common.sampling.top_p, 1.0f);
}

TEST(Schema, ChoicesOfOnePromptDrawFromDistinctSeedsAndTheFirstFromTheGivenOne) {
  SamplingParams s;
  EXPECT_FALSE(seed_of_choice(s, 1));
  s.seed = 7;
  EXPECT_EQ(seed_of_choice(s, 0), 7u);
  EXPECT_NE(seed_of_choice(s, 1), seed_of_choice(s, 2));
}

TEST(Schema, LogprobsOfChatAreABoolAndACount) {
  ChatBody out;
  ASSERT_FALSE(chat(R"({"messages":[{"role":"user","content":"x"}],"logprobs":true,
                        "top_logprobs":3})",
                    &out));
  EXPECT_EQ(out.common.sampling.logprobs, 3);
  ChatBody none;
  ASSERT_FALSE(chat(R"({"messages":[{"role":"user","content":"x"}]})", &none));
  EXPECT_EQ(none.common.sampling.logprobs, -1);
}

TEST(Schema, MessagesMustBeThere) {
  for (const char* body :
       {"{}", R"({"messages":[]})", R"({"messages":null})", R"({"messages":5})"}) {
    ChatBody out;
    const auto error = chat(body, &out);
    ASSERT_TRUE(error) << body;
    EXPECT_EQ(error->http_status, 400);
    EXPECT_NE(error->message.find("messages"), std::string::npos) << error->message;
  }
}

TEST(Schema, TokenizeTakesAPromptOrMessagesAndDetokenizeIds) {
  auto tokenize = [](const std::string& text) {
    Json body = Json::parse(text);
    TokenizeBody out;
    return parse_tokenize_body(body, &out);
  };
  EXPECT_FALSE(tokenize(R"({"prompt":""})"));
  EXPECT_FALSE(tokenize(R"({"prompt":"x","parse_special":true,"return_token_strs":true})"));
  EXPECT_FALSE(tokenize(R"({"messages":[{"role":"user","content":"x"}],"thinking":false})"));
  EXPECT_TRUE(tokenize("{}"));
  EXPECT_TRUE(tokenize(R"({"prompt":5})"));
  EXPECT_TRUE(tokenize(R"({"prompt":"x","messages":[{"role":"user","content":"x"}]})"));
  EXPECT_TRUE(tokenize(R"({"prompt":"x","nope":1})"));
  DetokenizeBody out;
  EXPECT_FALSE(parse_detokenize_body(Json::parse(R"({"tokens":[1,2]})"), kContext, &out));
  EXPECT_EQ(parse_detokenize_body(Json::parse(R"({"tokens":[1,2048]})"), kContext, &out)->param,
            "tokens[1]");
  EXPECT_TRUE(parse_detokenize_body(Json::parse("{}"), kContext, &out));
}

TEST(JsonBody, WhatIsNotOneGoodObjectIsRefusedWithoutRepeatingIt) {
  const std::string deep = "{\"a\":" + std::string(100000, '[') + std::string(100000, ']') + "}";
  const std::vector<std::string> bad = {"",
                                        "nonsense secret",
                                        "[1]",
                                        "5",
                                        "{\"a\":1,\"a\":2}",
                                        "{\"x\":{\"b\":1,\"c\":2,\"b\":3}}",
                                        "{\"a\":NaN}",
                                        "{\"a\":Infinity}",
                                        "{\"a\":1e999}",
                                        "{\"a\":1} secret",
                                        "{\"a\":\"secret\xff\"}",
                                        "{\"a\":\"\xc3\"}",
                                        "{\"a\":\"\\ud800\"}",
                                        "{\"a\":'x'}",
                                        "{\"a\":01}",
                                        "\xef\xbb\xbf{\"a\":1}",
                                        std::string("{\"a\":1}\0secret", 14),
                                        std::string("{\"a\":\"x\0\"}", 10),
                                        deep};
  for (const std::string& text : bad) {
    Json out;
    const auto error = parse_json_body(text, &out);
    ASSERT_TRUE(error) << text.substr(0, 60) << " was accepted";
    EXPECT_EQ(error->http_status, 400);
    EXPECT_EQ(error->message.find("secret"), std::string::npos) << error->message;
  }
  Json out;
  EXPECT_FALSE(parse_json_body(
      "{\"a\":" + std::string(kMaxBodyDepth - 1, '[') + std::string(kMaxBodyDepth - 1, ']') + "}",
      &out));
}

TEST(JsonBody, KeysKeepTheirOrderAndManyKeysAreNotQuadratic) {
  Json out;
  ASSERT_FALSE(parse_json_body(R"({"z":1,"a":{"y":[1,{"b":null}],"x":2},"m":"\u00e9"})", &out));
  EXPECT_EQ(out.dump(), "{\"z\":1,\"a\":{\"y\":[1,{\"b\":null}],\"x\":2},\"m\":\"é\"}");
  // 200,000 keys: 20 billion comparisons if each searched the earlier ones.
  std::string many = "{\"k\":0";
  for (int i = 0; i < 200000; ++i) many += ",\"" + std::to_string(i) + "\":1";
  Json big;
  EXPECT_FALSE(parse_json_body(many + "}", &big));
  EXPECT_EQ(big.size(), 200001u);
}

TEST(GenerationDefaults, OurKeysAreReadOthersLeftAloneAndBadValuesRefused) {
  auto good = parse_generation_defaults(R"({"temperature":0.6,"top_p":0.9,"eos_token_id":[1],
                                            "max_length":5,"top_k":20})",
                                        "g.json");
  ASSERT_TRUE(good.ok());
  EXPECT_FLOAT_EQ(good->temperature, 0.6f);
  EXPECT_EQ(good->top_k, 20);
  for (const char* bad : {R"({"temperature":"hot"})", R"({"top_p":0})", "[]", "{"}) {
    const auto result = parse_generation_defaults(bad, "g.json");
    ASSERT_FALSE(result.ok()) << bad;
    EXPECT_EQ(result.status().code(), ErrorCode::kCheckpoint);
  }
  EXPECT_FALSE(load_generation_defaults(K3_SOURCE_DIR "/models/k3-nano").status().code() !=
               ErrorCode::kOk);
}

}  // namespace
}  // namespace k3
