#include "engine/validate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>

#include "recording_sink.h"

namespace k3 {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;

Status validate(const std::function<void(Request&)>& change,
                ExecutorLimits limits = small_limits()) {
  FakeExecutor executor(limits);
  EngineOptions options = small_options();
  options.max_model_len = 1000;
  const Engine engine(&executor, options);
  Request request = make_request(10, 10, 1);
  change(request);
  return engine.validate(request);
}

TEST(Validate, AcceptsTheEdgesOfEveryRange) {
  EXPECT_TRUE(validate([](Request&) {}).ok());
  EXPECT_TRUE(validate([](Request& r) {
                r.prompt = {0, 255};
                r.sampling.max_tokens = 998;
                r.sampling.min_tokens = 998;
                r.sampling.temperature = 100.0f;
                r.sampling.top_k = 1000000;
                r.sampling.top_p = 1.0f;
                r.sampling.min_p = 1.0f;
                r.sampling.presence_penalty = -2.0f;
                r.sampling.frequency_penalty = 2.0f;
                r.sampling.repetition_penalty = 0.01f;
                r.sampling.logit_bias = {{0, -100.0f}, {255, 100.0f}};
                r.sampling.stop_token_ids = {0, 255};
                r.sampling.logprobs = 20;
              }).ok());
}

TEST(Validate, RefusesEveryFieldOutOfRangeByName) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float inf = std::numeric_limits<float>::infinity();
  struct Case {
    const char* field;
    std::function<void(Request&)> change;
  };
  std::vector<Case> cases = {
      {"prompt", [](Request& r) { r.prompt.clear(); }},
      {"prompt", [](Request& r) { r.prompt[3] = -1; }},
      {"prompt", [](Request& r) { r.prompt[3] = 256; }},
      {"max_tokens", [](Request& r) { r.sampling.max_tokens = 0; }},
      {"max_tokens", [](Request& r) { r.sampling.max_tokens = -1; }},
      {"max_tokens", [](Request& r) { r.sampling.max_tokens = INT64_MIN; }},
      {"min_tokens", [](Request& r) { r.sampling.min_tokens = -1; }},
      {"min_tokens", [](Request& r) { r.sampling.min_tokens = 11; }},
      {"top_k", [](Request& r) { r.sampling.top_k = -2; }},
      {"logprobs", [](Request& r) { r.sampling.logprobs = 21; }},
      {"logprobs", [](Request& r) { r.sampling.logprobs = -2; }},
      {"stop_token_ids",
       [](Request& r) {
         r.sampling.stop_token_ids = {1, 256};
       }},
      {"stop_token_ids", [](Request& r) { r.sampling.stop_token_ids = {-1}; }},
      {"logit_bias",
       [](Request& r) {
         r.sampling.logit_bias = {{256, 1.0f}};
       }},
      {"logit_bias",
       [](Request& r) {
         r.sampling.logit_bias = {{-1, 1.0f}};
       }},
      {"logit_bias",
       [](Request& r) {
         r.sampling.logit_bias = {{1, 100.5f}};
       }},
      {"logit_bias",
       [=](Request& r) {
         r.sampling.logit_bias = {{1, nan}};
       }},
  };
  const auto floats = [&](const char* field, float SamplingParams::*member,
                          std::vector<float> values) {
    values.push_back(nan);
    values.push_back(inf);
    values.push_back(-inf);
    for (float v : values) {
      cases.push_back({field, [=](Request& r) { r.sampling.*member = v; }});
    }
  };
  floats("temperature", &SamplingParams::temperature, {-0.1f});
  floats("top_p", &SamplingParams::top_p, {0.0f, -0.5f, 1.01f});
  floats("min_p", &SamplingParams::min_p, {-0.1f, 1.1f});
  floats("presence_penalty", &SamplingParams::presence_penalty, {-2.1f, 2.1f});
  floats("frequency_penalty", &SamplingParams::frequency_penalty, {-2.1f, 2.1f});
  floats("repetition_penalty", &SamplingParams::repetition_penalty, {0.0f, -1.0f});

  for (size_t i = 0; i < cases.size(); ++i) {
    const Status status = validate(cases[i].change);
    EXPECT_EQ(status.code(), ErrorCode::kInvalidArgument) << cases[i].field << ", case " << i;
    EXPECT_THAT(status.message(), StartsWith(cat(cases[i].field, ": ")));
  }
}

TEST(Validate, ALengthBeyondTheLimitIsRefusedWithBothNumbers) {
  for (int64_t max_tokens : {int64_t{989}, int64_t{990}}) {  // limit - 1, limit
    EXPECT_TRUE(validate([=](Request& r) { r.sampling.max_tokens = max_tokens; }).ok());
  }
  for (int64_t max_tokens : {int64_t{991}, int64_t{1000000000}, INT64_MAX - 1, INT64_MAX}) {
    const Status status = validate([=](Request& r) { r.sampling.max_tokens = max_tokens; });
    EXPECT_EQ(status.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(status.message(),
                AllOf(HasSubstr("10 tokens"), HasSubstr(cat("max_tokens ", max_tokens)),
                      HasSubstr("max_model_len 1000")));
  }
  // A prompt alone can be too long.
  EXPECT_FALSE(validate([](Request& r) { r.prompt.assign(1000, 0); }).ok());
  EXPECT_FALSE(validate([](Request& r) { r.prompt.assign(1001, 0); }).ok());
}

TEST(Validate, ANeedBeyondTheWholePoolIsRefusedWithBothNumbers) {
  ExecutorLimits limits = small_limits();
  limits.num_pages = 3;
  const auto fits = [](Request& r) { r.sampling.max_tokens = 3 * 64 - 10; };
  const auto too_big = [](Request& r) { r.sampling.max_tokens = 3 * 64 - 10 + 1; };
  EXPECT_TRUE(validate(fits, limits).ok());
  const Status status = validate(too_big, limits);
  EXPECT_EQ(status.code(), ErrorCode::kInvalidArgument);
  EXPECT_THAT(status.message(), AllOf(HasSubstr("4 KV pages"), HasSubstr("the pool has 3")));
}

TEST(Validate, OptionsAreLoweredToWhatTheExecutorCanDo) {
  ExecutorLimits limits = small_limits();
  limits.max_logit_rows = 5;
  FakeExecutor executor(limits);
  EngineOptions options;
  options.max_num_seqs = 100;
  options.max_num_batched_tokens = 1 << 20;
  options.max_queue = std::numeric_limits<int64_t>::max();
  options.end_token_ids = {3, 256, -1};
  const Engine engine(&executor, options);
  EXPECT_EQ(engine.options().max_model_len, 2048);
  EXPECT_EQ(engine.options().max_num_seqs, 5);
  EXPECT_EQ(engine.options().max_num_batched_tokens, 128);
  EXPECT_GT(engine.options().max_open(), int64_t{1} << 40);
  EXPECT_EQ(engine.options().end_token_ids, (std::vector<int32_t>{3}));
  EXPECT_GT(engine.options().clock(), 0.0);
}

TEST(Validate, AnExecutorThatCanRunNothingIsNamed) {
  ExecutorLimits limits = small_limits();
  limits.num_slots = 0;
  const Status status = validate([](Request&) {}, limits);
  EXPECT_EQ(status.code(), ErrorCode::kInternal);
  EXPECT_THAT(status.message(), HasSubstr("0 slots"));
}

}  // namespace
}  // namespace k3
