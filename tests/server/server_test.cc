// The whole server on a loopback port: real HTTP, real engine, real tokenizer; only the model is a
// script.
#include "server/server.h"

#include <gtest/gtest.h>
#include <spdlog/spdlog.h>

#include <chrono>
#include <nlohmann/json.hpp>
#include <thread>

#include "engine/engine_loop.h"
#include "fake_executor.h"
#include "http_client.h"
#include "nano.h"

namespace k3 {
namespace {

using nlohmann::json;
using testing::ClientReply;
using testing::FakeExecutor;
using testing::HttpClient;
using testing::ids_of;
using testing::nano_tokenizer;
using testing::sse_payloads;
using namespace std::chrono_literals;

constexpr int32_t kEndOfMsg = 1794;

// Says the text of the prompt's first word group: "count N" prompts get N tokens, everything else a
// fixed answer.
struct World {
  explicit World(int slots = 8, testing::Script script = nullptr, HttpOptions http = {},
                 std::function<void(ServerOptions*)> change = nullptr,
                 std::function<void(EngineOptions*)> change_engine = nullptr) {
    spdlog::set_level(spdlog::level::warn);
    if (!script) {
      script = [this](const std::vector<int32_t>&, size_t at) {
        return at < answer.size() ? answer[at] : kEndOfMsg;
      };
    }
    executor = std::make_unique<FakeExecutor>(slots, testing::kNanoVocab, std::move(script));
    ServerOptions options;
    options.http = std::move(http);
    options.http.port = 0;
    options.served_model_names = {"nano", "org/nano"};
    options.version = "test";
    if (change) change(&options);
    server = std::make_unique<Server>(options);
    const Status status = server->start();
    EXPECT_TRUE(status.ok()) << status.message();
    engine_options.max_model_len = 1024;
    engine_options.max_num_seqs = slots;
    engine_options.max_num_batched_tokens = executor->limits().max_rows;
    engine_options.max_queue = 64;
    engine_options.end_token_ids = {kEndOfMsg, 1793};
    if (change_engine) change_engine(&engine_options);
  }
  ~World() {
    executor->hold = false;
    server->stop(0);
    loop.reset();
  }

  void ready() {
    loop = std::make_unique<EngineLoop>(executor.get(), engine_options);
    ModelContext context;
    context.engine = loop.get();
    context.tokenizer = nano_tokenizer();
    context.vocab_size = testing::kNanoVocab;
    context.max_model_len = engine_options.max_model_len;
    context.defaults.temperature = 0;
    context.description = executor->description();
    server->set_ready(context);
  }

  bool eventually(const std::function<bool()>& condition,
                  std::chrono::milliseconds limit = 5000ms) {
    const auto end = std::chrono::steady_clock::now() + limit;
    while (std::chrono::steady_clock::now() < end) {
      if (condition()) return true;
      std::this_thread::sleep_for(2ms);
    }
    return false;
  }
  bool idle() {
    return eventually([&] { return loop->stats().running + loop->stats().waiting == 0; });
  }
  uint16_t port() const { return server->port(); }

  std::vector<int32_t> answer = ids_of("Paris is the capital of France.");
  EngineOptions engine_options;
  std::unique_ptr<FakeExecutor> executor;
  std::unique_ptr<Server> server;
  std::unique_ptr<EngineLoop> loop;
};

const char* kHello =
    R"({"model":"nano","messages":[{"role":"user","content":"hello"}],"thinking":false})";
const char* kHelloStream =
    R"({"model":"nano","messages":[{"role":"user","content":"hello"}],"thinking":false,"stream":true})";
const char* kPrompt = R"({"model":"nano","prompt":"hello","max_tokens":64})";
const char* kLong = R"({"model":"nano","prompt":"hello","max_tokens":900,"ignore_eos":true})";
const char* kLongStream =
    R"({"model":"nano","prompt":"hello","max_tokens":900,"ignore_eos":true,"stream":true})";

TEST(Server, ListensBeforeTheModelIsThereAndSaysHowFarItIs) {
  World w;
  w.server->set_load_progress(0.37, "shard 3 of 8");
  HttpClient client(w.port());
  ClientReply reply = client.request("GET", "/health");
  EXPECT_EQ(reply.status, 503);
  EXPECT_EQ(reply.json()["status"], "loading");
  EXPECT_DOUBLE_EQ(reply.json()["progress"].get<double>(), 0.37);
  EXPECT_EQ(client.request("GET", "/metrics").status, 200);
  for (const char* path : {"/v1/models", "/version"}) {
    reply = client.request("GET", path);
    EXPECT_EQ(reply.status, 503) << path;
    EXPECT_EQ(reply.headers.count("retry-after"), 1u);
    EXPECT_EQ(reply.json()["error"]["code"], "model_loading");
  }
  EXPECT_EQ(client.request("POST", "/v1/chat/completions", kHello).status, 503);
  w.ready();
  EXPECT_EQ(client.request("GET", "/health").status, 200);
  EXPECT_EQ(client.request("POST", "/v1/chat/completions", kHello).status, 200);
}

TEST(Server, AnswersACompletionAndAChatWithUsage) {
  World w;
  w.ready();
  HttpClient client(w.port());
  ClientReply reply = client.request("POST", "/v1/completions", kPrompt);
  ASSERT_EQ(reply.status, 200) << reply.body;
  json body = reply.json();
  EXPECT_EQ(body["object"], "text_completion");
  EXPECT_EQ(body["choices"][0]["text"], "Paris is the capital of France.");
  EXPECT_EQ(body["choices"][0]["finish_reason"], "stop");
  EXPECT_EQ(body["usage"]["completion_tokens"], w.answer.size() + 1) << "the end id counts";
  EXPECT_EQ(body["usage"]["prompt_tokens"], nano_tokenizer()->encode("hello").size());
  EXPECT_EQ(body["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
  reply = client.request("POST", "/v1/chat/completions", kHello);
  ASSERT_EQ(reply.status, 200) << reply.body;
  body = reply.json();
  EXPECT_EQ(body["choices"][0]["message"]["content"], "Paris is the capital of France.");
  EXPECT_EQ(body["id"].get<std::string>().rfind("chatcmpl-", 0), 0u);
}

TEST(Server, H5_AStreamIsOneRoleContentOneFinishUsageAndDone) {
  World w;
  w.ready();
  HttpClient client(w.port());
  std::string body = kHelloStream;
  body.insert(body.size() - 1, R"(,"stream_options":{"include_usage":true})");
  const ClientReply reply = client.request("POST", "/v1/chat/completions", body);
  ASSERT_EQ(reply.status, 200);
  EXPECT_TRUE(reply.complete);
  EXPECT_EQ(reply.headers.at("content-type").rfind("text/event-stream", 0), 0u);
  const auto payloads = sse_payloads(reply.body);
  ASSERT_GE(payloads.size(), 5u);
  EXPECT_EQ(payloads.back(), "[DONE]");
  const json first = json::parse(payloads[0]);
  EXPECT_EQ(first["choices"][0]["delta"].dump(), R"({"role":"assistant"})");
  std::string text;
  int finishes = 0, usages = 0;
  for (size_t i = 0; i + 1 < payloads.size(); ++i) {
    const json frame = json::parse(payloads[i]);
    usages += frame.contains("usage") ? 1 : 0;
    if (frame["choices"].empty()) continue;
    const json& choice = frame["choices"][0];
    finishes += choice["finish_reason"].is_null() ? 0 : 1;
    for (const auto& [key, value] : choice["delta"].items()) EXPECT_FALSE(value.is_null()) << key;
    if (choice["delta"].contains("content")) {
      EXPECT_NE(choice["delta"]["content"], "");
      text += choice["delta"]["content"].get<std::string>();
    }
  }
  EXPECT_EQ(finishes, 1);
  EXPECT_EQ(usages, 1);
  EXPECT_EQ(text, "Paris is the capital of France.");
}

TEST(Server, H10_H16_StopStringsEndARequestEarlyAndFreeItsSlot) {
  World w;
  w.ready();
  HttpClient client(w.port());
  for (const char* stream : {"false", "true"}) {
    const ClientReply reply = client.request(
        "POST", "/v1/completions",
        std::string(R"({"prompt":"hello","max_tokens":64,"stop":" capital","stream":)") + stream +
            "}");
    ASSERT_EQ(reply.status, 200) << reply.body;
    EXPECT_EQ(reply.body.find("capital"), reply.body.find("\"stop_reason\":\" capital\"") + 16);
    EXPECT_NE(reply.body.find("\"finish_reason\":\"stop\""), std::string::npos);
  }
  EXPECT_TRUE(w.idle());
}

TEST(Server, ToolCallsStreamAndNonStreamAgree) {
  World w;
  w.answer = ids_of(
      "Look.<|open|>tools<|sep|><|open|>call tool=\"get_weather\" index=\"1\"<|sep|>"
      "<|open|>argument key=\"city\" type=\"string\"<|sep|>Paris<|close|>argument<|sep|>"
      "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>");
  w.ready();
  HttpClient client(w.port());
  const std::string base =
      R"({"messages":[{"role":"user","content":"weather?"}],"tools":[{"type":"function","function":{"name":"get_weather","parameters":{"type":"object"}}}])";
  const json whole = client.request("POST", "/v1/chat/completions", base + "}").json();
  const json& message = whole["choices"][0]["message"];
  EXPECT_EQ(whole["choices"][0]["finish_reason"], "tool_calls");
  EXPECT_TRUE(message["content"].is_null());
  EXPECT_EQ(message["reasoning_content"], "Look.");
  ASSERT_EQ(message["tool_calls"].size(), 1u) << whole.dump();
  const std::string arguments = message["tool_calls"][0]["function"]["arguments"];
  EXPECT_EQ(json::parse(arguments)["city"], "Paris");
  const ClientReply stream =
      client.request("POST", "/v1/chat/completions", base + R"(,"stream":true})");
  std::string pieces;
  for (const std::string& payload : sse_payloads(stream.body)) {
    if (payload == "[DONE]") continue;
    const json frame = json::parse(payload);
    const json& delta = frame["choices"][0]["delta"];
    if (!delta.contains("tool_calls")) continue;
    const json& call = delta["tool_calls"][0];
    EXPECT_EQ(call.contains("id"), pieces.empty() && call["function"]["arguments"] == "");
    pieces += call["function"]["arguments"].get<std::string>();
  }
  EXPECT_EQ(pieces, arguments);
  const json none =
      client.request("POST", "/v1/chat/completions", base + R"(,"tool_choice":"none"})").json();
  EXPECT_FALSE(none["choices"][0]["message"].contains("tool_calls"));
  EXPECT_EQ(none["choices"][0]["finish_reason"], "stop");
}

TEST(Server, SeveralPromptsTimesNComeInOrder) {
  // Each prompt is answered with its own first id, so the order shows.
  World w(8, [](const std::vector<int32_t>& prompt, size_t at) {
    return at < 3 ? prompt[0] : kEndOfMsg;
  });
  w.ready();
  HttpClient client(w.port());
  const json body =
      client
          .request("POST", "/v1/completions", R"({"prompt":["b",[365],"a"],"n":2,"max_tokens":8})")
          .json();
  ASSERT_EQ(body["choices"].size(), 6u) << body.dump();
  const std::string said[] = {"bbb", "", "aaa"};
  for (size_t i = 0; i < 6; ++i) {
    EXPECT_EQ(body["choices"][i]["index"], i);
    if (i / 2 != 1) {
      EXPECT_EQ(body["choices"][i]["text"], said[i / 2]);
    }
  }
  EXPECT_EQ(body["choices"][2]["text"], body["choices"][3]["text"]);
  EXPECT_EQ(body["usage"]["completion_tokens"], 24);
}

TEST(Server, EchoPutsThePromptFirst) {
  World w;
  w.ready();
  HttpClient client(w.port());
  const std::string body = R"({"prompt":"smörgås: ","max_tokens":64,"echo":true,"stream":)";
  EXPECT_EQ(client.request("POST", "/v1/completions", body + "false}").json()["choices"][0]["text"],
            "smörgås: Paris is the capital of France.");
  std::string text;
  for (const auto& p :
       sse_payloads(client.request("POST", "/v1/completions", body + "true}").body)) {
    if (p != "[DONE]") text += json::parse(p)["choices"][0]["text"].get<std::string>();
  }
  EXPECT_EQ(text, "smörgås: Paris is the capital of France.");
}

TEST(Server, H15_LogprobsHaveOneEntryATokenAndGoThroughStreams) {
  World w;
  w.ready();
  HttpClient client(w.port());
  const json body =
      client.request("POST", "/v1/completions", R"({"prompt":"x","max_tokens":64,"logprobs":2})")
          .json();
  const json& l = body["choices"][0]["logprobs"];
  EXPECT_EQ(l["tokens"].size(), w.answer.size());
  EXPECT_EQ(l["token_logprobs"].size(), w.answer.size());
  for (size_t i = 0; i < w.answer.size(); ++i) {
    EXPECT_LE(l["token_logprobs"][i].get<double>(), 0);
    EXPECT_GE(l["top_logprobs"][i].size(), 2u);
  }
  std::string chat = kHelloStream;
  chat.insert(chat.size() - 1, R"(,"logprobs":true,"top_logprobs":1)");
  std::string joined;
  for (const auto& p : sse_payloads(client.request("POST", "/v1/chat/completions", chat).body)) {
    if (p == "[DONE]") continue;
    const json frame = json::parse(p);
    const json& choice = frame["choices"][0];
    if (!choice.contains("logprobs")) continue;
    for (const json& e : choice["logprobs"]["content"]) {
      joined += e["token"].get<std::string>();
      EXPECT_EQ(e["top_logprobs"].size(), 1u);
      EXPECT_EQ(e["bytes"].size(), e["token"].get<std::string>().size());
    }
  }
  EXPECT_EQ(joined, "Paris is the capital of France.");
}

TEST(Server, H50_LimitsAreExactAndErrorsCarryBothNumbers) {
  World w;
  w.ready();
  HttpClient client(w.port());
  const auto n = static_cast<int64_t>(nano_tokenizer()->encode("hello").size());
  auto ask = [&](const std::string& max_tokens) {
    return client.request("POST", "/v1/completions",
                          R"({"prompt":"hello","max_tokens":)" + max_tokens + "}");
  };
  EXPECT_EQ(ask(std::to_string(1024 - n - 1)).status, 200);
  EXPECT_EQ(ask(std::to_string(1024 - n)).status, 200);
  for (const std::string& m : {std::to_string(1024 - n + 1), std::string("1000000000")}) {
    const ClientReply reply = ask(m);
    EXPECT_EQ(reply.status, 400);
    const std::string message = reply.json()["error"]["message"];
    EXPECT_NE(message.find(m), std::string::npos) << message;
    EXPECT_NE(message.find("1024"), std::string::npos) << message;
  }
  for (const char* m : {"9223372036854775808", "-1", "0", "\"5\"", "1.5", "9223372036854775807"}) {
    EXPECT_EQ(ask(m).status, 400) << m;
  }
  // A prompt beyond the context, with the default budget.
  std::string big = R"({"prompt":[5)";
  for (int i = 0; i < 1100; ++i) big += ",5";
  const ClientReply reply = client.request("POST", "/v1/completions", big + "]}");
  EXPECT_EQ(reply.status, 400);
  EXPECT_EQ(reply.json()["error"]["code"], "context_length_exceeded");
}

TEST(Server, ErrorsComeBeforeAnyFrameAndHaveOpenAIsShape) {
  World w;
  w.ready();
  HttpClient client(w.port());
  ClientReply reply =
      client.request("POST", "/v1/chat/completions",
                     R"({"messages":[{"role":"user","content":"x"}],"stream":true,"n":0})");
  EXPECT_EQ(reply.status, 400);
  EXPECT_EQ(reply.headers.at("content-type"), "application/json");
  const json error = reply.json()["error"];
  for (const char* key : {"message", "type", "param", "code"})
    EXPECT_TRUE(error.contains(key)) << key;
  EXPECT_EQ(error["param"], "n");
  reply = client.request("POST", "/v1/completions", R"({"model":"gpt","prompt":"x"})");
  EXPECT_EQ(reply.status, 404);
  EXPECT_EQ(reply.json()["error"]["code"], "model_not_found");
  EXPECT_EQ(client.request("POST", "/v1/completions", "{oops").status, 400);
  EXPECT_EQ(client.request("POST", "/v1/completions", std::string(5000, '[')).status, 400);
  EXPECT_EQ(client.request("GET", "/nothing").status, 404);
  reply = client.request("GET", "/v1/completions");
  EXPECT_EQ(reply.status, 405);
  EXPECT_NE(reply.headers.at("allow").find("POST"), std::string::npos);
  EXPECT_EQ(client.request("DELETE", "/v1/models").status, 405);
  for (const auto& [type, status] : {std::pair("text/plain", 415),
                                     {"application/json; charset=latin1", 415},
                                     {"application/json;v=1; charset=\"UTF-8\"", 400}}) {
    client.send_raw(cat("POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: ", type,
                        "\r\nContent-Length: 2\r\n\r\n{}"));
    EXPECT_EQ(client.read_reply().status, status) << type;
  }
  // Harmless fields have types, too.
  for (const char* field : {"model", "user", "metadata", "store", "prompt_cache_key"}) {
    const json body{{"prompt", "x"}, {field, field == std::string("model") ? json("") : json(7)}};
    reply = client.request("POST", "/v1/completions", body.dump());
    EXPECT_EQ(reply.status, 400) << field;
    EXPECT_EQ(reply.json()["error"]["param"], field);
  }
  client.send_raw("GET / HTTP/1.1\r\n\r\n");
  reply = client.read_reply();
  EXPECT_EQ(reply.status, 400);
  EXPECT_EQ(reply.headers.count("x-request-id"), 1u);
}

TEST(Server, TheSmallEndpoints) {
  World w;
  w.ready();
  HttpClient client(w.port());
  EXPECT_EQ(client.request("GET", "/ping").status, 200);
  const json models = client.request("GET", "/v1/models").json();
  EXPECT_EQ(models["data"][0]["id"], "nano");
  EXPECT_EQ(models["data"][1]["max_model_len"], 1024);
  EXPECT_EQ(client.request("GET", "/v1/models/org/nano").json()["id"], "org/nano");
  EXPECT_EQ(client.request("GET", "/v1/models/org%2Fnano").json()["id"], "org/nano");
  EXPECT_EQ(client.request("GET", "/v1/models/other").status, 404);
  EXPECT_EQ(client.request("GET", "/version").json()["engine"], "scripted executor");
  ClientReply reply = client.request("HEAD", "/health");
  EXPECT_EQ(reply.status, 200);
  EXPECT_EQ(client.request("GET", "/health?probe=1").status, 200) << "HEAD must have no body";
  const json tokens =
      client.request("POST", "/tokenize", R"({"prompt":"hi 🎉","return_token_strs":true})").json();
  EXPECT_EQ(tokens["count"], tokens["tokens"].size());
  EXPECT_EQ(tokens["token_strs"].size(), tokens["tokens"].size());
  json back;
  back["tokens"] = tokens["tokens"];
  EXPECT_EQ(client.request("POST", "/detokenize", back.dump()).json()["prompt"], "hi 🎉");
  EXPECT_EQ(
      client.request("POST", "/tokenize", R"({"prompt":"<|open|>"})").json()["tokens"].size() > 1,
      true);
  EXPECT_EQ(client.request("POST", "/tokenize", R"({"prompt":"<|open|>","parse_special":true})")
                .json()["count"],
            1);
  const json chat =
      client
          .request("POST", "/tokenize",
                   R"({"messages":[{"role":"user","content":"hello"}],"thinking":false})")
          .json();
  const json usage = client.request("POST", "/v1/chat/completions", kHello).json()["usage"];
  EXPECT_EQ(chat["count"], usage["prompt_tokens"]);
  const std::string metrics = client.request("GET", "/metrics").body;
  for (const char* name :
       {"k3:num_requests_running", "k3:generation_tokens_total",
        "k3:time_to_first_token_seconds_bucket", "k3:e2e_request_latency_seconds_sum",
        "k3:request_success_total{model_name=\"nano\",finished_reason=\"stop\"} 1"}) {
    EXPECT_NE(metrics.find(name), std::string::npos) << name;
  }
}

TEST(Server, ApiKeysGuardTheApiAndNothingElse) {
  World w(8, nullptr, {}, [](ServerOptions* o) { o->api_keys = {"sesame", "other"}; });
  w.ready();
  HttpClient client(w.port());
  EXPECT_EQ(client.request("GET", "/health").status, 200);
  for (const char* header :
       {"", "Authorization: Bearer wrong\r\n", "Authorization: Bearer sesam\r\n",
        "Authorization: sesame\r\n", "Authorization: Bearer \r\n"}) {
    const ClientReply reply = client.request("GET", "/v1/models", "", header);
    EXPECT_EQ(reply.status, 401) << header;
    EXPECT_EQ(reply.json()["error"]["code"], "invalid_api_key");
  }
  EXPECT_EQ(client.request("POST", "/tokenize", R"({"prompt":"x"})").status, 401);
  EXPECT_EQ(client.request("GET", "/v1/models", "", "Authorization: Bearer other\r\n").status, 200);
  EXPECT_EQ(client.request("OPTIONS", "/v1/models").status, 200) << "a preflight carries no key";
}

TEST(Server, CorsAllowsAnyOriginOrTheListedOnes) {
  World any;
  any.ready();
  HttpClient client(any.port());
  EXPECT_EQ(client.request("GET", "/health").headers.count("access-control-allow-origin"), 0u);
  EXPECT_EQ(client.request("GET", "/health", "", "Origin: http://a\r\n")
                .headers.at("access-control-allow-origin"),
            "*");
  const ClientReply preflight =
      client.request("OPTIONS", "/v1/chat/completions", "",
                     "Origin: http://a\r\nAccess-Control-Request-Method: "
                     "POST\r\nAccess-Control-Request-Headers: authorization, content-type\r\n");
  EXPECT_EQ(preflight.headers.at("access-control-allow-headers"), "authorization, content-type");
  World listed(8, nullptr, {}, [](ServerOptions* o) { o->allowed_origins = {"http://a"}; });
  listed.ready();
  HttpClient other(listed.port());
  EXPECT_EQ(other.request("GET", "/health", "", "Origin: http://a\r\n")
                .headers.at("access-control-allow-origin"),
            "http://a");
  EXPECT_EQ(other.request("GET", "/health", "", "Origin: http://b\r\n")
                .headers.count("access-control-allow-origin"),
            0u);
}

TEST(Server, RequestIdsAreTakenOverWhenTheyAreSafe) {
  World w;
  w.ready();
  HttpClient client(w.port());
  EXPECT_EQ(
      client.request("GET", "/health", "", "X-Request-Id: abc-1.2\r\n").headers.at("x-request-id"),
      "abc-1.2");
  EXPECT_EQ(client.request("GET", "/health", "", "X-Request-Id: a b\r\n")
                .headers.at("x-request-id")
                .rfind("req-", 0),
            0u);
}

TEST(Server, H48_ADisconnectCancelsStreamsAndWholeAnswersAndQueuedOnes) {
  World w(2);
  w.executor->step_delay = 2ms;
  w.ready();
  for (const char* body : {kLongStream, kLong}) {
    std::vector<HttpClient> clients;
    for (int i = 0; i < 4; ++i) {  // two run, two wait
      clients.emplace_back(w.port());
      clients.back().send_request("POST", "/v1/completions", body);
    }
    ASSERT_TRUE(
        w.eventually([&] { return w.loop->stats().running == 2 && w.loop->stats().waiting == 2; }));
    if (body == kLongStream) {
      ASSERT_TRUE(clients[0].receive());
    }
    clients.clear();
    EXPECT_TRUE(w.eventually([&] { return w.loop->stats().running + w.loop->stats().waiting == 0; },
                             1000ms))
        << body;
  }
  HttpClient next(w.port());
  EXPECT_EQ(next.request("POST", "/v1/completions", kPrompt).status, 200);
}

TEST(Server, ADisconnectCancelsEveryChoice) {
  World w(8);
  w.executor->step_delay = 2ms;
  w.ready();
  {
    HttpClient client(w.port());
    client.send_request("POST", "/v1/completions",
                        R"({"prompt":["a","b"],"n":3,"max_tokens":900,"ignore_eos":true})");
    ASSERT_TRUE(w.eventually([&] { return w.loop->stats().running == 6; }));
  }
  EXPECT_TRUE(w.eventually([&] { return w.loop->stats().running == 0; }, 1000ms));
}

TEST(Server, ASlowReaderIsDroppedAndNobodyElseWaits) {
  HttpOptions http;
  http.max_pending_bytes = 16 << 10;
  const int32_t letter = nano_tokenizer()->encode("a")[0];
  World w(
      4, [letter](const std::vector<int32_t>&, size_t) { return letter; }, http, nullptr,
      [](EngineOptions* o) { o->max_model_len = 4000; });
  w.executor->step_delay = 50us;
  w.ready();
  HttpClient slow(w.port(), 2048);
  // Many choices of many tokens, none of them read.
  slow.send_request(
      "POST", "/v1/completions",
      R"({"prompt":["a","b","c"],"max_tokens":3900,"ignore_eos":true,"stream":true,"logprobs":20})");
  HttpClient brisk(w.port());
  EXPECT_EQ(brisk.request("POST", "/v1/completions", kPrompt).status, 200);
  // It may have come and gone before anyone looks, so what counts is that it was dropped.
  EXPECT_TRUE(w.eventually(
      [&] {
        return brisk.request("GET", "/metrics").body.find("k3:slow_readers_total 1") !=
               std::string::npos;
      },
      20000ms));
  EXPECT_TRUE(w.eventually([&] { return w.loop->stats().running == 0; }, 20000ms));
}

TEST(Server, QueueFullIs503WithRetryAfter) {
  World w(1, nullptr, {}, nullptr, [](EngineOptions* o) { o->max_queue = 2; });
  w.ready();
  w.executor->hold = true;
  std::vector<HttpClient> clients;
  for (int i = 0; i < 3; ++i) {
    clients.emplace_back(w.port());
    clients.back().send_request("POST", "/v1/completions", kPrompt);
    ASSERT_TRUE(w.eventually([&] {
      return w.loop->stats().running + w.loop->stats().waiting == i + 1;
    }) || i > 0);
    std::this_thread::sleep_for(50ms);
  }
  HttpClient late(w.port());
  const ClientReply reply = late.request("POST", "/v1/completions", kPrompt);
  EXPECT_EQ(reply.status, 503) << reply.body;
  EXPECT_EQ(reply.headers.count("retry-after"), 1u);
  w.executor->hold = false;
  for (HttpClient& c : clients) EXPECT_EQ(c.read_reply().status, 200);
}

// It could never succeed: no 503 that asks to come again.
TEST(Server, MoreChoicesThanCanBeOpenAre400) {
  World w(1, nullptr, {}, nullptr, [](EngineOptions* o) { o->max_queue = 2; });
  w.ready();
  HttpClient client(w.port());
  ClientReply reply = client.request("POST", "/v1/completions",
                                     R"({"model":"nano","prompt":"ab","max_tokens":2,"n":4})");
  EXPECT_EQ(reply.status, 400) << reply.body;
  EXPECT_EQ(reply.json()["error"]["param"], "n");
  reply = client.request("POST", "/v1/completions",
                         R"({"model":"nano","prompt":["a","b","c","d"],"max_tokens":2})");
  EXPECT_EQ(reply.status, 400) << reply.body;
  EXPECT_EQ(reply.json()["error"]["param"], "prompt");
  reply = client.request("POST", "/v1/completions",
                         R"({"model":"nano","prompt":"ab","max_tokens":2,"n":3})");
  EXPECT_EQ(reply.status, 200) << reply.body;
}

TEST(Server, H32_AnEngineFaultIsAnErrorToTheClientAndToHealth) {
  World w(4);
  w.executor->step_delay = 2ms;
  w.ready();
  HttpClient stream(w.port()), whole(w.port());
  stream.send_request("POST", "/v1/completions", kLongStream);
  ASSERT_TRUE(stream.receive());
  whole.send_request("POST", "/v1/completions", kLong);
  ASSERT_TRUE(w.eventually([&] { return w.loop->stats().running == 2; }));
  w.executor->fail_steps = 1;
  const ClientReply failed = whole.read_reply();
  EXPECT_EQ(failed.status, 500);
  EXPECT_NE(failed.json()["error"]["message"].get<std::string>().find("device broke"),
            std::string::npos);
  const ClientReply cut = stream.read_reply();
  const auto payloads = sse_payloads(cut.body);
  EXPECT_TRUE(json::parse(payloads.back()).contains("error")) << payloads.back();
  HttpClient client(w.port());
  EXPECT_TRUE(w.eventually([&] { return client.request("GET", "/health").status == 503; }));
  EXPECT_EQ(client.request("GET", "/health").json()["status"], "error");
  EXPECT_EQ(client.request("POST", "/v1/completions", kPrompt).status, 503);
}

TEST(Server, ConcurrentStreamsEachGetTheirOwnAnswer) {
  World w(16, [](const std::vector<int32_t>& prompt, size_t at) {
    return at < 40 ? prompt[0] : kEndOfMsg;
  });
  w.ready();
  std::vector<std::thread> threads;
  std::atomic<int> good{0};
  for (int t = 0; t < 32; ++t) {
    threads.emplace_back([&, t] {
      HttpClient client(w.port());
      const std::string letter(1, static_cast<char>('a' + t % 26));
      for (int round = 0; round < 3; ++round) {
        const ClientReply reply =
            client.request("POST", "/v1/completions",
                           R"({"prompt":")" + letter + R"(","max_tokens":64,"stream":)" +
                               (t % 2 == 0 ? "true}" : "false}"));
        std::string text;
        if (t % 2 == 0) {
          for (const auto& p : sse_payloads(reply.body)) {
            if (p != "[DONE]") text += json::parse(p)["choices"][0]["text"].get<std::string>();
          }
        } else {
          text = reply.json()["choices"][0]["text"];
        }
        if (text == std::string(40, letter[0])) ++good;
      }
    });
  }
  for (auto& t : threads) t.join();
  EXPECT_EQ(good, 96);
}

TEST(Server, StopLetsRequestsFinishAndRefusesNewOnes) {
  World w(2);
  w.executor->step_delay = 5ms;
  w.ready();
  HttpClient running(w.port()), other(w.port());
  EXPECT_EQ(other.request("GET", "/health").status, 200);
  running.send_request("POST", "/v1/completions", kPrompt);
  ASSERT_TRUE(w.eventually([&] { return w.loop->stats().running == 1; }));
  std::thread stopper([&] { EXPECT_TRUE(w.server->stop(10)); });
  ASSERT_TRUE(w.eventually([&] { return other.request("GET", "/health").status == 503; }));
  EXPECT_EQ(running.read_reply().status, 200);
  stopper.join();
  EXPECT_FALSE(HttpClient(w.port()).connected());
}

TEST(Server, ASecondSignalCutsTheDrainShort) {
  World w(2);
  w.executor->step_delay = 5ms;
  w.ready();
  HttpClient whole(w.port()), stream(w.port());
  whole.send_request("POST", "/v1/completions", kLong);
  stream.send_request("POST", "/v1/completions", kLongStream);
  ASSERT_TRUE(stream.receive());
  ASSERT_TRUE(w.eventually([&] { return w.loop->stats().running == 2; }));
  const auto start = std::chrono::steady_clock::now();
  std::thread stopper([&] { w.server->stop(60); });
  std::this_thread::sleep_for(50ms);
  w.server->stop_now();
  EXPECT_EQ(whole.read_reply().status, 503);
  EXPECT_NE(stream.read_reply().body.find("shutting down"), std::string::npos);
  whole.close();
  stream.close();
  stopper.join();
  EXPECT_LT(std::chrono::steady_clock::now() - start, 5s);
}

}  // namespace
}  // namespace k3
