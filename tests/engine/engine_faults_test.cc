// Foul weather: cancellation at every stage, poisoned rows, failing steps, lost devices.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "engine/engine.h"
#include "recording_sink.h"

namespace k3 {
namespace {

using testing::AllOf;
using testing::HasSubstr;

void expect_no_leak(const Engine& engine, const FakeExecutor& executor) {
  const EngineStats stats = engine.stats();
  EXPECT_EQ(stats.running + stats.waiting, 0);
  EXPECT_EQ(stats.slots_free, executor.limits().num_slots);
  EXPECT_EQ(stats.pages_free, executor.limits().num_pages);
  EXPECT_THAT(executor.violations, testing::IsEmpty());
}

// ---- cancellation

TEST(EngineCancel, EveryStageFreesTheSlotBeforeTheNextStepAndLeavesOthersAlone) {
  // Steps taken before the cancel: 0 = queued, 1 = mid-prefill, 3 = first token out, 9 = one token
  // before the last.
  for (int steps : {0, 1, 3, 9}) {
    FakeExecutor executor(small_limits());
    Engine engine(&executor, small_options());
    Request victim = make_request(300, 8, 1), other = make_request(20, 30, 2);
    const Result<RequestId> id = engine.submit(victim);
    ASSERT_TRUE(id.ok());
    ASSERT_TRUE(engine.submit(other).ok());
    for (int i = 0; i < steps; ++i) ASSERT_TRUE(engine.step().ok());
    ASSERT_FALSE(sink_of(victim).finished()) << steps;
    const size_t tokens = sink_of(victim).tokens().size();
    EXPECT_EQ(tokens, steps < 3 ? 0u : static_cast<size_t>(steps - 2)) << steps;

    engine.cancel(*id);
    EXPECT_EQ(sink_of(victim).finish().reason, FinishReason::kCancelled);
    const int64_t others_slots = steps == 0 ? 0 : 1;
    EXPECT_EQ(engine.stats().slots_free, 8 - others_slots);
    EXPECT_EQ(engine.stats().pages_free, 64 - others_slots);
    engine.cancel(*id);  // again: nothing
    engine.cancel(12345);

    ASSERT_TRUE(run_to_end(&engine));
    EXPECT_EQ(sink_of(victim).num_finishes(), 1);
    EXPECT_EQ(sink_of(victim).tokens().size(), tokens);
    EXPECT_EQ(sink_of(other).tokens(), greedy_by_hand(other.prompt, 30));
    EXPECT_EQ(engine.stats().finished_cancelled, 1);
    expect_no_leak(engine, executor);
  }
}

TEST(EngineCancel, ASinkMayCancelItselfAtAnyToken) {
  for (size_t at : {1u, 4u, 8u}) {  // first, middle, last
    FakeExecutor executor(small_limits());
    Engine engine(&executor, small_options());
    Request r = make_request(5, 8, 1);
    RequestId id = 0;
    size_t count = 0;
    sink_of(r).hook = [&](const TokenOutput&) {
      if (++count == at) engine.cancel(id);
      return true;
    };
    id = *engine.submit(r);
    ASSERT_TRUE(run_to_end(&engine));
    EXPECT_EQ(sink_of(r).tokens().size(), at);
    EXPECT_EQ(sink_of(r).finish().reason, FinishReason::kCancelled);
    EXPECT_EQ(sink_of(r).num_finishes(), 1);
    expect_no_leak(engine, executor);
  }
}

TEST(EngineCancel, ASinkMayCancelAnotherOfTheSameStepAndNoTokenFollows) {
  FakeExecutor executor(small_limits());
  Engine engine(&executor, small_options());
  Request a = make_request(5, 8, 1), b = make_request(5, 8, 2), c = make_request(5, 8, 3);
  RequestId b_id = 0, c_id = 0;
  sink_of(a).hook = [&](const TokenOutput&) {
    if (sink_of(a).tokens().size() == 3) engine.cancel(b_id);
    return true;
  };
  sink_of(b).finish_hook = [&](const FinishInfo&) { engine.cancel(c_id); };
  ASSERT_TRUE(engine.submit(a).ok());
  b_id = *engine.submit(b);
  c_id = *engine.submit(c);
  ASSERT_TRUE(run_to_end(&engine));
  EXPECT_EQ(sink_of(a).tokens(), greedy_by_hand(a.prompt, 8));
  EXPECT_EQ(sink_of(b).tokens().size(), 2u);
  EXPECT_EQ(sink_of(b).finish().reason, FinishReason::kCancelled);
  EXPECT_EQ(sink_of(c).tokens().size(), 3u);
  EXPECT_EQ(sink_of(c).finish().reason, FinishReason::kCancelled);
  expect_no_leak(engine, executor);
}

TEST(EngineCancel, DestructionCancelsWhatIsLeft) {
  FakeExecutor executor(small_limits());
  std::vector<Request> requests;
  {
    Engine engine(&executor, small_options());
    for (uint64_t i = 0; i < 12; ++i) {
      requests.push_back(make_request(5, 8, i));
      ASSERT_TRUE(engine.submit(requests.back()).ok());
    }
    ASSERT_TRUE(engine.step().ok());
  }
  for (const Request& r : requests) {
    EXPECT_EQ(sink_of(r).num_finishes(), 1);
    EXPECT_EQ(sink_of(r).finish().reason, FinishReason::kCancelled);
  }
}

// ---- poisoned rows

TEST(EngineFailure, ANonFiniteRowFailsItsRequestAloneAndTheNextOnTheSlotIsClean) {
  for (float poison :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    ExecutorLimits limits = small_limits();
    limits.num_slots = 3;
    FakeExecutor executor(limits);
    int poisoned = 0;
    executor.on_row = [&](const StepBatch&, const Segment& s, std::span<float> row) {
      if (s.position == 12 && s.slot == 1 && poisoned++ == 0) row[200] = poison;
    };
    Engine engine(&executor, small_options());
    std::vector<Request> requests;
    for (uint64_t i = 0; i < 9; ++i) {
      requests.push_back(make_request(10, 12, i));
      ASSERT_TRUE(engine.submit(requests.back()).ok());
    }
    ASSERT_TRUE(run_to_end(&engine));
    for (size_t i = 0; i < requests.size(); ++i) {
      const FinishInfo finish = sink_of(requests[i]).finish();
      EXPECT_EQ(sink_of(requests[i]).num_finishes(), 1);
      if (i == 1) {
        EXPECT_EQ(finish.reason, FinishReason::kError);
        EXPECT_EQ(finish.error.code(), ErrorCode::kInternal);
        EXPECT_THAT(finish.error.message(),
                    AllOf(HasSubstr("request 2"), HasSubstr("position 12"), HasSubstr("not finite"),
                          HasSubstr("token id 200")));
        EXPECT_EQ(sink_of(requests[i]).tokens().size(), 3u);
      } else {
        EXPECT_EQ(finish.reason, FinishReason::kLength);
        EXPECT_EQ(sink_of(requests[i]).tokens(), greedy_by_hand(requests[i].prompt, 12));
      }
    }
    EXPECT_EQ(engine.stats().finished_error, 1);
    expect_no_leak(engine, executor);
  }
}

TEST(EngineFailure, ARowOfMinusInfinityFailsItsRequest) {
  FakeExecutor executor(small_limits());
  executor.on_row = [](const StepBatch&, const Segment&, std::span<float> row) {
    std::fill(row.begin(), row.end(), -std::numeric_limits<float>::infinity());
  };
  Engine engine(&executor, small_options());
  Request r = make_request(5, 5, 1);
  ASSERT_TRUE(engine.submit(r).ok());
  ASSERT_TRUE(run_to_end(&engine));
  EXPECT_EQ(sink_of(r).finish().error.code(), ErrorCode::kInternal);
  expect_no_leak(engine, executor);
}

// ---- failing steps

TEST(EngineFailure, AFailingStepIsTakenApartAndOnlyTheGuiltySegmentFails) {
  FakeExecutor executor(small_limits());
  executor.before_step = [](const StepBatch& batch) -> Status {
    for (const Segment& s : batch.segments) {
      // One request's prompt makes the executor fail, whenever its first chunk comes.
      if (s.position == 0 && s.tokens.size() > 2 && s.tokens[0] == 250 && s.tokens[1] == 251) {
        return {ErrorCode::kMemory, "scratch exhausted"};
      }
    }
    return {};
  };
  Engine engine(&executor, small_options());
  std::vector<Request> requests;
  for (uint64_t i = 0; i < 6; ++i) {
    requests.push_back(make_request(20 + static_cast<int64_t>(i), 10, i));
    if (i == 3) requests.back().prompt[0] = 250, requests.back().prompt[1] = 251;
    ASSERT_TRUE(engine.submit(requests.back()).ok());
    if (i % 2 == 0) {
      ASSERT_TRUE(engine.step().ok());
    }
  }
  ASSERT_TRUE(run_to_end(&engine));
  for (size_t i = 0; i < requests.size(); ++i) {
    if (i == 3) {
      EXPECT_EQ(sink_of(requests[i]).finish().reason, FinishReason::kError);
      EXPECT_EQ(sink_of(requests[i]).finish().error.code(), ErrorCode::kMemory);
      EXPECT_THAT(sink_of(requests[i]).finish().error.message(),
                  AllOf(HasSubstr("request 4"), HasSubstr("scratch exhausted")));
    } else {
      EXPECT_EQ(sink_of(requests[i]).tokens(), greedy_by_hand(requests[i].prompt, 10));
    }
  }
  expect_no_leak(engine, executor);
}

TEST(EngineFailure, APassingFailureCostsNobodyATokenAndAPermanentOneEndsEveryRequest) {
  for (bool permanent : {false, true}) {
    FakeExecutor executor(small_limits());
    executor.before_step = [&](const StepBatch&) -> Status {
      if (executor.num_steps == 4 || (permanent && executor.num_steps > 4)) {
        return {ErrorCode::kInternal, "hiccup"};
      }
      return {};
    };
    Engine engine(&executor, small_options());
    std::vector<Request> requests;
    for (uint64_t i = 0; i < 5; ++i) {
      requests.push_back(make_request(40, 10, i));
      ASSERT_TRUE(engine.submit(requests.back()).ok());
    }
    ASSERT_TRUE(run_to_end(&engine, 1000));
    for (const Request& r : requests) {
      EXPECT_EQ(sink_of(r).num_finishes(), 1);
      if (permanent) {
        EXPECT_EQ(sink_of(r).finish().reason, FinishReason::kError);
      } else {
        EXPECT_EQ(sink_of(r).tokens(), greedy_by_hand(r.prompt, 10));
      }
    }
    expect_no_leak(engine, executor);
  }
}

// ---- fatal errors

TEST(EngineFailure, ALostDeviceFailsEveryRequestAndTheEngineStaysDown) {
  for (ErrorCode code : {ErrorCode::kDevice, ErrorCode::kRankLost}) {
    FakeExecutor executor(small_limits());
    executor.before_step = [&](const StepBatch&) -> Status {
      return executor.num_steps < 3 ? Status() : Status(code, "gone");
    };
    Engine engine(&executor, small_options());
    std::vector<Request> requests;
    for (uint64_t i = 0; i < 10; ++i) {  // 8 running, 2 waiting
      requests.push_back(make_request(5, 10, i));
      ASSERT_TRUE(engine.submit(requests.back()).ok());
    }
    ASSERT_TRUE(engine.step().ok());
    ASSERT_TRUE(engine.step().ok());
    const Result<bool> result = engine.step();
    ASSERT_FALSE(result.ok());
    EXPECT_EQ(result.status().code(), code);
    for (const Request& r : requests) {
      EXPECT_EQ(sink_of(r).num_finishes(), 1);
      EXPECT_EQ(sink_of(r).finish().reason, FinishReason::kError);
      EXPECT_EQ(sink_of(r).finish().error.code(), code);
      EXPECT_EQ(sink_of(r).finish().error.message(), "gone");
    }
    const Status refused = engine.submit(make_request(5, 5, 1)).status();
    EXPECT_EQ(refused.code(), ErrorCode::kUnavailable);
    EXPECT_THAT(refused.message(), HasSubstr("gone"));
    EXPECT_EQ(engine.step().status().code(), code);
    EXPECT_EQ(executor.num_steps, 3);
    expect_no_leak(engine, executor);
  }
}

TEST(EngineFailure, ADeviceLostWhileTakingAStepApartIsFatal) {
  FakeExecutor executor(small_limits());
  executor.before_step = [&](const StepBatch&) -> Status {
    if (executor.num_steps == 2) return {ErrorCode::kMemory, "first"};
    if (executor.num_steps == 4) return {ErrorCode::kDevice, "then worse"};
    return {};
  };
  Engine engine(&executor, small_options());
  std::vector<Request> requests;
  for (uint64_t i = 0; i < 4; ++i) {
    requests.push_back(make_request(5, 10, i));
    ASSERT_TRUE(engine.submit(requests.back()).ok());
  }
  ASSERT_TRUE(engine.step().ok());
  EXPECT_EQ(engine.step().status().code(), ErrorCode::kDevice);
  for (const Request& r : requests) {
    EXPECT_EQ(sink_of(r).num_finishes(), 1);
    EXPECT_EQ(sink_of(r).finish().error.code(), ErrorCode::kDevice);
  }
  expect_no_leak(engine, executor);
}

TEST(EngineFailure, AnExecutorThatReturnsTooFewRowsIsFatal) {
  FakeExecutor executor(small_limits());
  executor.drop_rows = 1;
  Engine engine(&executor, small_options());
  Request a = make_request(5, 10, 1), b = make_request(5, 10, 2);
  ASSERT_TRUE(engine.submit(a).ok());
  ASSERT_TRUE(engine.submit(b).ok());
  const Status status = engine.step().status();
  EXPECT_EQ(status.code(), ErrorCode::kInternal);
  EXPECT_THAT(status.message(), AllOf(HasSubstr("1 rows"), HasSubstr("expected 2 rows")));
  EXPECT_EQ(sink_of(a).finish().reason, FinishReason::kError);
  EXPECT_EQ(sink_of(b).num_finishes(), 1);
}

TEST(EngineFailure, FailAllEndsQueuedAndRunningButTheEngineGoesOn) {
  FakeExecutor executor(small_limits());
  Engine engine(&executor, small_options());
  std::vector<Request> requests;
  for (uint64_t i = 0; i < 10; ++i) {
    requests.push_back(make_request(5, 10, i));
    ASSERT_TRUE(engine.submit(requests.back()).ok());
  }
  ASSERT_TRUE(engine.step().ok());
  engine.fail_all({ErrorCode::kUnavailable, "maintenance"});
  for (const Request& r : requests) {
    EXPECT_EQ(sink_of(r).finish().error.code(), ErrorCode::kUnavailable);
  }
  Request r = make_request(5, 10, 1);
  ASSERT_TRUE(engine.submit(r).ok());
  ASSERT_TRUE(run_to_end(&engine));
  EXPECT_EQ(sink_of(r).tokens(), greedy_by_hand(r.prompt, 10));
  expect_no_leak(engine, executor);
}

}  // namespace
}  // namespace k3
