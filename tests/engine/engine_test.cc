// A request's life under good weather: equality with single runs, ends, order, limits, fairness.
#include "engine/engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "recording_sink.h"

namespace k3 {
namespace {

using testing::HasSubstr;

void expect_no_leak(const Engine& engine, const FakeExecutor& executor) {
  const EngineStats stats = engine.stats();
  EXPECT_EQ(stats.running, 0);
  EXPECT_EQ(stats.waiting, 0);
  EXPECT_EQ(stats.slots_free, executor.limits().num_slots);
  EXPECT_EQ(stats.pages_free, executor.limits().num_pages);
  EXPECT_THAT(executor.violations, testing::IsEmpty());
}

// 32 requests of every kind: greedy and seeded, short and long prompts, with and without penalties.
std::vector<Request> mixed_requests() {
  std::vector<Request> requests;
  for (uint64_t i = 0; i < 32; ++i) {
    const int64_t prompt = i % 8 == 0 ? 300 + static_cast<int64_t>(i) : 1 + mix(i) % 90;
    Request r = make_request(prompt, 1 + static_cast<int64_t>(mix(i + 100) % 40), i);
    SamplingParams& s = r.sampling;
    if (i % 2 == 1) {
      s.temperature = 0.7f;
      s.seed = i;
      s.top_p = 0.9f;
      s.top_k = i % 3 == 0 ? 40 : 0;
    }
    if (i % 4 == 3) {
      s.repetition_penalty = 1.2f;
      s.presence_penalty = 0.5f;
    }
    if (i % 5 == 0) s.logprobs = 3;
    if (i % 7 == 0) s.stop_token_ids = {1, 2, 3, 4, 5, 6, 7, 8};
    s.ignore_eos = i % 3 == 0;
    requests.push_back(std::move(r));
  }
  return requests;
}

using Outcome = std::pair<std::vector<int32_t>, FinishReason>;

Outcome run_alone(Request request, FakeExecutor* executor) {
  request.sink = std::make_shared<RecordingSink>();
  Engine engine(executor, small_options());
  EXPECT_TRUE(engine.submit(request).ok());
  EXPECT_TRUE(run_to_end(&engine));
  return {sink_of(request).tokens(), sink_of(request).finish().reason};
}

// How many of the mixed requests end otherwise among 31 others than alone. `sabotage` breaks the
// executor of the shared run.
int count_differences(
    const std::function<void(const StepBatch&, const Segment&, std::span<float>)>& sabotage) {
  FakeExecutor shared(small_limits());
  shared.on_row = sabotage;
  Engine engine(&shared, small_options());
  const std::vector<Request> requests = mixed_requests();
  for (const Request& r : requests) EXPECT_TRUE(engine.submit(r).ok());
  EXPECT_TRUE(run_to_end(&engine));
  expect_no_leak(engine, shared);
  EXPECT_GT(shared.mixed_steps, 0) << "no step mixed decode rows with prefill";
  EXPECT_EQ(shared.most_segments, small_limits().num_slots);
  int differences = 0;
  for (const Request& r : requests) {
    FakeExecutor own(small_limits());
    const Outcome here = {sink_of(r).tokens(), sink_of(r).finish().reason};
    differences += here != run_alone(r, &own) ? 1 : 0;
    EXPECT_EQ(sink_of(r).num_finishes(), 1);
    EXPECT_FALSE(sink_of(r).out_of_order());
    EXPECT_EQ(sink_of(r).finish().stats.completion_tokens,
              static_cast<int64_t>(sink_of(r).tokens().size()));
  }
  return differences;
}

TEST(Engine, ThirtyTwoMixedRequestsEqualTheirSingleRuns) {
  EXPECT_EQ(count_differences(nullptr), 0);
}

TEST(Engine, TheEqualityTestNoticesAnExecutorWhoseRowsDoNotStandAlone) {
  EXPECT_GT(count_differences([](const StepBatch& batch, const Segment&, std::span<float> row) {
              row[batch.segments.size()] += 4.0f;
            }),
            0);
  EXPECT_GT(count_differences([](const StepBatch&, const Segment& s, std::span<float> row) {
              row[static_cast<size_t>(s.slot)] += 4.0f;
            }),
            0);
}

TEST(Engine, GreedyEqualsTheModelWalkedByHandAcrossPageBoundaries) {
  for (int64_t prompt : {1, 63, 64, 65, 127, 128, 129, 500}) {
    FakeExecutor executor(small_limits());
    Engine engine(&executor, small_options());
    Request r = make_request(prompt, 130, 5);
    ASSERT_TRUE(engine.submit(r).ok());
    ASSERT_TRUE(run_to_end(&engine));
    EXPECT_EQ(sink_of(r).tokens(), greedy_by_hand(r.prompt, 130));
    EXPECT_EQ(sink_of(r).finish().reason, FinishReason::kLength);
    expect_no_leak(engine, executor);
  }
}

TEST(Engine, TheFakeExecutorNoticesBrokenBatches) {
  const auto first_violation = [](const StepBatch& second) -> std::string {
    FakeExecutor executor(small_limits());
    const std::vector<int32_t> tokens = {1, 2, 3}, pages = {0, 1};
    StepResult result;
    EXPECT_TRUE(
        executor.step({{{.slot = 0, .position = 0, .tokens = tokens, .pages = pages}}}, &result)
            .ok());
    EXPECT_FALSE(executor.step(second, &result).ok());
    return executor.violations.empty() ? "" : executor.violations[0];
  };
  const std::vector<int32_t> one = {1}, bad = {256}, pages = {0, 1}, others = {2, 3}, none;
  const std::vector<int32_t> many(129, 0), four = {4, 5, 6};
  EXPECT_THAT(first_violation({}), HasSubstr("empty"));
  EXPECT_THAT(first_violation({{{.slot = 0, .position = 4, .tokens = one, .pages = pages}}}),
              HasSubstr("stands at 3"));
  EXPECT_THAT(first_violation({{{.slot = 0, .position = 3, .tokens = one, .pages = others}}}),
              HasSubstr("no longer belongs"));
  EXPECT_THAT(first_violation({{{.slot = 0, .position = 3, .tokens = bad, .pages = pages}}}),
              HasSubstr("token 256"));
  EXPECT_THAT(first_violation({{{.slot = 0, .position = 3, .tokens = one, .pages = none}}}),
              HasSubstr("block table"));
  EXPECT_THAT(first_violation({{{.slot = 0, .position = 3, .tokens = one, .pages = pages},
                                {.slot = 1, .position = 0, .tokens = one, .pages = pages}}}),
              HasSubstr("two sequences"));
  EXPECT_THAT(first_violation({{{.slot = 0, .position = 3, .tokens = one, .pages = pages},
                                {.slot = 0, .position = 3, .tokens = one, .pages = others}}}),
              HasSubstr("two segments"));
  EXPECT_THAT(first_violation({{{.slot = 1, .position = 0, .tokens = many, .pages = four}}}),
              HasSubstr("129 rows"));
}

TEST(Engine, ASeededRequestRepeatsAndAnUnseededOneDoesNot) {
  const auto run = [](std::optional<uint64_t> engine_seed, std::optional<uint64_t> seed) {
    FakeExecutor executor(small_limits());
    EngineOptions options = small_options();
    options.seed = engine_seed;
    Engine engine(&executor, options);
    std::vector<std::vector<int32_t>> out;
    for (int i = 0; i < 2; ++i) {
      Request r = make_request(5, 20, 1);
      r.sampling.temperature = 1;
      r.sampling.seed = seed;
      EXPECT_TRUE(engine.submit(r).ok());
      EXPECT_TRUE(run_to_end(&engine));
      out.push_back(sink_of(r).tokens());
    }
    return out;
  };
  const auto seeded = run(std::nullopt, 7), again = run(std::nullopt, 7);
  EXPECT_EQ(seeded[0], seeded[1]);
  EXPECT_EQ(seeded, again);
  EXPECT_NE(run(std::nullopt, 8)[0], seeded[0]);
  const auto unseeded = run(std::nullopt, std::nullopt);
  EXPECT_NE(unseeded[0], unseeded[1]);
  EXPECT_NE(run(std::nullopt, std::nullopt), unseeded);
  EXPECT_EQ(run(3, std::nullopt), run(3, std::nullopt));
}

// ---- ends

// A request whose greedy token number `n` (zero-based) is returned in *token.
Request request_with_nth(int64_t n, int32_t* token) {
  Request r = make_request(9, 30, 77);
  *token = greedy_by_hand(r.prompt, n + 1).back();
  return r;
}

TEST(Engine, AnEndIdEndsTheRequestAndCounts) {
  int32_t end = 0;
  Request r = request_with_nth(4, &end);
  r.sampling.ignore_eos = false;
  FakeExecutor executor(small_limits());
  EngineOptions options = small_options();
  options.end_token_ids = {end, kEndId};
  Engine engine(&executor, options);
  ASSERT_TRUE(engine.submit(r).ok());
  ASSERT_TRUE(run_to_end(&engine));
  EXPECT_EQ(sink_of(r).finish().reason, FinishReason::kStop);
  EXPECT_EQ(sink_of(r).finish().stop_token, end);
  ASSERT_EQ(sink_of(r).tokens(), greedy_by_hand(r.prompt, 5));
  EXPECT_TRUE(sink_of(r).outputs().back().is_end);
  EXPECT_FALSE(sink_of(r).outputs().front().is_end);
  EXPECT_EQ(sink_of(r).finish().stats.completion_tokens, 5);
  EXPECT_EQ(sink_of(r).finish().stats.prompt_tokens, 9);
  expect_no_leak(engine, executor);
}

TEST(Engine, IgnoreEosGoesOnToExactlyMaxTokensButStopIdsStillStop) {
  int32_t end = 0;
  Request ignoring = request_with_nth(4, &end);
  Request stopping = request_with_nth(4, &end);
  stopping.sampling.stop_token_ids = {end};
  FakeExecutor executor(small_limits());
  EngineOptions options = small_options();
  options.end_token_ids = {end};
  Engine engine(&executor, options);
  ASSERT_TRUE(engine.submit(ignoring).ok());
  ASSERT_TRUE(engine.submit(stopping).ok());
  ASSERT_TRUE(run_to_end(&engine));
  EXPECT_EQ(sink_of(ignoring).tokens(), greedy_by_hand(ignoring.prompt, 30));
  EXPECT_EQ(sink_of(ignoring).finish().reason, FinishReason::kLength);
  EXPECT_EQ(sink_of(ignoring).finish().stop_token, -1);
  EXPECT_TRUE(sink_of(ignoring).outputs()[4].is_end);
  EXPECT_EQ(sink_of(stopping).tokens().size(), 5u);
  EXPECT_EQ(sink_of(stopping).finish().reason, FinishReason::kStop);
  EXPECT_EQ(sink_of(stopping).finish().stop_token, end);
}

TEST(Engine, AnEndIdAsTheVeryLastTokenIsAStopNotALength) {
  int32_t end = 0;
  Request r = request_with_nth(4, &end);
  r.sampling.stop_token_ids = {end};
  r.sampling.max_tokens = 5;
  FakeExecutor executor(small_limits());
  Engine engine(&executor, small_options());
  ASSERT_TRUE(engine.submit(r).ok());
  ASSERT_TRUE(run_to_end(&engine));
  EXPECT_EQ(sink_of(r).finish().reason, FinishReason::kStop);
}

TEST(Engine, MinTokensMasksEndAndStopIdsUntilThen) {
  for (int64_t min_tokens : {0, 3, 12}) {
    FakeExecutor executor(small_limits());
    // The model wants the end id, then the stop id, whatever the history.
    executor.on_row = [](const StepBatch&, const Segment&, std::span<float> row) {
      row[kEndId] = 20;
      row[17] = 19;
    };
    Engine engine(&executor, small_options());
    Request r = make_request(4, 20, 3);
    r.sampling.ignore_eos = false;
    r.sampling.stop_token_ids = {17};
    r.sampling.min_tokens = min_tokens;
    ASSERT_TRUE(engine.submit(r).ok());
    ASSERT_TRUE(run_to_end(&engine));
    const std::vector<int32_t> tokens = sink_of(r).tokens();
    ASSERT_EQ(static_cast<int64_t>(tokens.size()), min_tokens + 1);
    EXPECT_EQ(tokens.back(), kEndId);
    for (int64_t i = 0; i < min_tokens; ++i) {
      EXPECT_NE(tokens[static_cast<size_t>(i)], kEndId);
      EXPECT_NE(tokens[static_cast<size_t>(i)], 17);
    }
  }
}

TEST(Engine, ASinkThatHasEnoughStopsTheRequestAndItsSlotServesTheNext) {
  ExecutorLimits limits = small_limits();
  limits.num_slots = 1;
  FakeExecutor executor(limits);
  Engine engine(&executor, small_options());
  Request first = make_request(70, 50, 1), second = make_request(70, 20, 2);
  sink_of(first).hook = [n = 0](const TokenOutput&) mutable { return ++n < 3; };
  ASSERT_TRUE(engine.submit(first).ok());
  ASSERT_TRUE(engine.submit(second).ok());
  ASSERT_TRUE(run_to_end(&engine));
  EXPECT_EQ(sink_of(first).tokens().size(), 3u);
  EXPECT_EQ(sink_of(first).finish().reason, FinishReason::kStop);
  EXPECT_EQ(sink_of(first).finish().stop_token, -1);
  EXPECT_EQ(sink_of(second).tokens(), greedy_by_hand(second.prompt, 20));
  expect_no_leak(engine, executor);
}

TEST(Engine, OneTokenIsOneStepAndNoDecode) {
  FakeExecutor executor(small_limits());
  Engine engine(&executor, small_options());
  Request r = make_request(64, 1, 4);
  ASSERT_TRUE(engine.submit(r).ok());
  const Result<bool> more = engine.step();
  ASSERT_TRUE(more.ok());
  EXPECT_FALSE(*more);
  EXPECT_EQ(sink_of(r).tokens(), greedy_by_hand(r.prompt, 1));
  EXPECT_EQ(sink_of(r).finish().reason, FinishReason::kLength);
  EXPECT_EQ(executor.num_steps, 1);
}

TEST(Engine, ARequestThatFillsTheContextExactlyRunsToItsEnd) {
  ExecutorLimits limits = small_limits();
  limits.max_positions = 200;
  limits.num_pages = 4;
  for (int64_t max_tokens : {99, 100}) {
    FakeExecutor executor(limits);
    Engine engine(&executor, small_options());
    Request r = make_request(100, max_tokens, 4);
    ASSERT_TRUE(engine.submit(r).ok());
    ASSERT_TRUE(run_to_end(&engine));
    EXPECT_EQ(sink_of(r).tokens(), greedy_by_hand(r.prompt, max_tokens));
    expect_no_leak(engine, executor);
  }
  FakeExecutor executor(limits);
  Engine engine(&executor, small_options());
  for (int64_t max_tokens : {int64_t{101}, int64_t{1000000000}, INT64_MAX}) {
    Request r = make_request(100, 1, 4);
    r.sampling.max_tokens = max_tokens;
    EXPECT_EQ(engine.submit(r).status().code(), ErrorCode::kInvalidArgument);
    EXPECT_FALSE(sink_of(r).finished());
  }
}

TEST(Engine, LogprobsComeWithTheTokenTheyBelongTo) {
  FakeExecutor executor(small_limits());
  Engine engine(&executor, small_options());
  Request with = make_request(6, 8, 4), without = make_request(6, 8, 4);
  with.sampling.logprobs = 2;
  ASSERT_TRUE(engine.submit(with).ok());
  ASSERT_TRUE(engine.submit(without).ok());
  ASSERT_TRUE(run_to_end(&engine));
  const auto outputs = sink_of(with).outputs();
  const auto tops = sink_of(with).tops();
  ASSERT_EQ(outputs.size(), 8u);
  for (size_t i = 0; i < outputs.size(); ++i) {
    EXPECT_EQ(outputs[i].chosen.token, outputs[i].token);
    EXPECT_EQ(outputs[i].chosen.rank, 1);
    EXPECT_LT(outputs[i].chosen.logprob, 0);
    ASSERT_EQ(tops[i].size(), 2u);
    EXPECT_EQ(tops[i][0].token, outputs[i].token);
    EXPECT_EQ(tops[i][0].logprob, outputs[i].chosen.logprob);
  }
  EXPECT_EQ(sink_of(with).tokens(), sink_of(without).tokens());
  EXPECT_TRUE(sink_of(without).tops()[0].empty());
}

TEST(Engine, TimesRunFromSubmitToFirstScheduleToFirstTokenToEnd) {
  double now = 100;
  ExecutorLimits limits = small_limits();
  limits.num_slots = 1;
  FakeExecutor executor(limits);
  executor.before_step = [&](const StepBatch&) {
    now += 1;
    return Status();
  };
  EngineOptions options = small_options();
  options.clock = [&] { return now; };
  Engine engine(&executor, options);
  Request first = make_request(200, 3, 1), second = make_request(1, 2, 2);
  ASSERT_TRUE(engine.submit(first).ok());  // 2 prefill steps of 128 rows, 2 decode steps
  ASSERT_TRUE(engine.submit(second).ok());
  ASSERT_TRUE(run_to_end(&engine));
  const RequestStats a = sink_of(first).finish().stats, b = sink_of(second).finish().stats;
  EXPECT_EQ(a.queue_seconds, 0);
  EXPECT_EQ(a.ttft_seconds, 2);
  EXPECT_EQ(a.total_seconds, 4);
  EXPECT_EQ(b.queue_seconds, 4);
  EXPECT_EQ(b.ttft_seconds, 5);
  EXPECT_EQ(b.total_seconds, 6);
}

TEST(Engine, StatsCountWhatHappened) {
  FakeExecutor executor(small_limits());
  Engine engine(&executor, small_options());
  std::vector<Request> requests;
  for (uint64_t i = 0; i < 10; ++i) requests.push_back(make_request(10, 5, i));
  for (const Request& r : requests) ASSERT_TRUE(engine.submit(r).ok());
  EXPECT_EQ(engine.stats().waiting, 10);
  engine.admit();
  EXPECT_EQ(engine.stats().waiting, 2);
  EXPECT_EQ(engine.stats().running, 8);
  EXPECT_EQ(engine.stats().slots_free, 0);
  EXPECT_EQ(engine.stats().pages_free, 64 - 8);
  EXPECT_EQ(engine.stats().pages_total, 64);
  ASSERT_TRUE(run_to_end(&engine));
  EXPECT_EQ(engine.stats().prompt_tokens, 100);
  EXPECT_EQ(engine.stats().generated_tokens, 50);
  EXPECT_EQ(engine.stats().finished_length, 10);
  EXPECT_EQ(engine.stats().steps, executor.num_steps);
}

// ---- queue and fairness

TEST(Engine, AFullQueueRefusesAndTakesAgainWhenItMoves) {
  FakeExecutor executor(small_limits());
  EngineOptions options = small_options();
  options.max_num_seqs = 2;
  options.max_queue = 1;
  Engine engine(&executor, options);
  const Request first = make_request(4, 4, 1);
  ASSERT_TRUE(engine.submit(first).ok());
  for (uint64_t i = 0; i < 2; ++i) ASSERT_TRUE(engine.submit(make_request(4, 4, i)).ok());
  const Request refused = make_request(4, 4, 9);
  const Status status = engine.submit(refused).status();
  EXPECT_EQ(status.code(), ErrorCode::kUnavailable);
  EXPECT_THAT(status.message(), HasSubstr("3 requests are running or waiting"));
  while (!sink_of(first).finished()) ASSERT_TRUE(engine.step().ok());
  EXPECT_TRUE(engine.submit(make_request(4, 4, 10)).ok());
  ASSERT_TRUE(run_to_end(&engine));
  EXPECT_FALSE(sink_of(refused).finished());
}

TEST(Engine, RequestsOfEqualShapeFinishInOrderOfArrival) {
  ExecutorLimits limits = small_limits();
  limits.num_slots = 2;
  FakeExecutor executor(limits);
  Engine engine(&executor, small_options());
  std::vector<RequestId> finished, submitted;
  for (uint64_t i = 0; i < 9; ++i) {
    Request r = make_request(10, 5, i);
    RequestId expected = i + 1;
    sink_of(r).finish_hook = [&finished, expected](const FinishInfo&) {
      finished.push_back(expected);
    };
    const Result<RequestId> id = engine.submit(r);
    ASSERT_TRUE(id.ok());
    submitted.push_back(*id);
  }
  ASSERT_TRUE(run_to_end(&engine));
  EXPECT_EQ(finished, submitted);
}

TEST(Engine, ATenThousandTokenPromptDoesNotDelayAnothersFirstToken) {
  const ExecutorLimits limits = {.num_slots = 8,
                                 .max_rows = 256,
                                 .max_logit_rows = 8,
                                 .num_pages = 400,
                                 .max_positions = 20000,
                                 .vocab_size = 256};
  FakeExecutor executor(limits);
  Engine engine(&executor, small_options());
  Request decoding = make_request(4, 400, 1), giant = make_request(10000, 4, 2);
  ASSERT_TRUE(engine.submit(decoding).ok());
  ASSERT_TRUE(engine.step().ok());
  ASSERT_TRUE(engine.submit(giant).ok());
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(engine.step().ok());
  const Request brief = make_request(100, 4, 3);
  ASSERT_TRUE(engine.submit(brief).ok());

  int64_t steps_to_brief = 0, steps_to_giant = 0;
  for (int64_t step = 1; !sink_of(giant).finished(); ++step) {
    const size_t decoded = sink_of(decoding).tokens().size();
    ASSERT_TRUE(engine.step().ok());
    // Decode is never held up by prefill.
    ASSERT_EQ(sink_of(decoding).tokens().size(), decoded + 1);
    if (steps_to_brief == 0 && !sink_of(brief).tokens().empty()) steps_to_brief = step;
    if (steps_to_giant == 0 && !sink_of(giant).tokens().empty()) steps_to_giant = step;
  }
  // Two prompts take turns: 2 * ceil(100 / 64) = 4 turns of 64 in steps of 255 prefill rows.
  EXPECT_GT(steps_to_brief, 0);
  EXPECT_LE(steps_to_brief, 2);
  // Behind the giant it would have waited for the rest of 10,000 tokens.
  EXPECT_GT(steps_to_giant, 35);
  EXPECT_EQ(sink_of(giant).tokens(), greedy_by_hand(giant.prompt, 4));
  ASSERT_TRUE(run_to_end(&engine));
  expect_no_leak(engine, executor);
}

TEST(Engine, ABigRequestIsNotStarvedByAStreamOfSmallOnes) {
  ExecutorLimits limits = small_limits();
  limits.num_pages = 8;
  FakeExecutor executor(limits);
  Engine engine(&executor, small_options());
  uint64_t salt = 0;
  for (int i = 0; i < 6; ++i) ASSERT_TRUE(engine.submit(make_request(4, 20, salt++)).ok());
  ASSERT_TRUE(engine.step().ok());
  const Request big = make_request(8 * 64 - 4, 4, 99);  // every page
  ASSERT_TRUE(engine.submit(big).ok());
  int64_t steps = 0;
  while (sink_of(big).tokens().empty() && steps < 200) {
    ASSERT_TRUE(engine.submit(make_request(4, 20, salt++)).ok());  // would fit now
    ASSERT_TRUE(engine.step().ok());
    ++steps;
  }
  EXPECT_LE(steps, 20 + 4);  // the running ones end, then four steps of prefill
}

TEST(Engine, ValidateAndSubmitAgreeAndASinkIsRequired) {
  FakeExecutor executor(small_limits());
  Engine engine(&executor, small_options());
  Request r = make_request(4, 4, 1);
  r.sink = nullptr;
  EXPECT_TRUE(engine.validate(r).ok());
  EXPECT_EQ(engine.submit(r).status().code(), ErrorCode::kInvalidArgument);
  r = make_request(4, 4, 1);
  r.sampling.top_p = 0;
  EXPECT_EQ(engine.submit(r).status().message(), engine.validate(r).message());
  EXPECT_EQ(engine.stats().waiting, 0);
}

}  // namespace
}  // namespace k3
