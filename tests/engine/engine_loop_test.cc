#include "engine/engine_loop.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "recording_sink.h"

namespace k3 {
namespace {

using std::chrono::milliseconds;
using testing::HasSubstr;

// Holds the executor inside a step until opened.
class Gate {
 public:
  void pass() {
    std::unique_lock lock(mutex_);
    ++arrivals_;
    changed_.notify_all();
    changed_.wait(lock, [this] { return open_; });
  }
  void wait_for_arrival() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return arrivals_ > 0; });
  }
  void open() {
    std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int arrivals_ = 0;
  bool open_ = false;
};

// The published figures follow a sink's on_finish by a moment.
bool becomes_idle(const EngineLoop& loop) {
  for (int i = 0; i < 5000; ++i) {
    const EngineStats stats = loop.stats();
    if (stats.running == 0 && stats.waiting == 0) return true;
    std::this_thread::sleep_for(milliseconds(1));
  }
  return false;
}

TEST(EngineLoop, RequestsOfManyThreadsAllGetTheirOwnTokens) {
  FakeExecutor executor(small_limits());
  {
    EngineLoop loop(&executor, small_options());
    std::vector<std::thread> threads;
    for (uint64_t t = 0; t < 4; ++t) {
      threads.emplace_back([&loop, t] {
        std::vector<Request> requests;
        for (uint64_t i = 0; i < 10; ++i) {
          requests.push_back(
              make_request(1 + static_cast<int64_t>(mix(i + 10 * t) % 100), 10, i + 10 * t));
          EXPECT_TRUE(loop.validate(requests.back()).ok());
          EXPECT_TRUE(loop.submit(requests.back()).ok());
          EXPECT_GE(loop.stats().slots_free, 0);
        }
        for (const Request& r : requests) {
          EXPECT_TRUE(sink_of(r).wait_finished());
          EXPECT_EQ(sink_of(r).tokens(), greedy_by_hand(r.prompt, 10));
        }
      });
    }
    for (std::thread& t : threads) t.join();
    EXPECT_TRUE(becomes_idle(loop));
    EXPECT_EQ(loop.stats().finished_length, 40);
    EXPECT_EQ(loop.stats().slots_free, 8);
    EXPECT_EQ(loop.stats().pages_free, 64);
    EXPECT_TRUE(loop.health().ok());
  }
  EXPECT_THAT(executor.violations, testing::IsEmpty());
}

TEST(EngineLoop, SleepsWhenIdleAndWakesAtOnce) {
  FakeExecutor executor(small_limits());
  EngineOptions options = small_options();
  std::atomic<int64_t> clock_calls{0};
  options.clock = [&] {
    ++clock_calls;
    return 0.0;
  };
  EngineLoop loop(&executor, options);
  for (uint64_t i = 0; i < 3; ++i) {
    const Request r = make_request(4, 3, i);
    const auto start = std::chrono::steady_clock::now();
    ASSERT_TRUE(loop.submit(r).ok());
    ASSERT_TRUE(sink_of(r).wait_finished());
    EXPECT_LT(std::chrono::steady_clock::now() - start, milliseconds(500));
    ASSERT_TRUE(becomes_idle(loop));
    const EngineStats before = loop.stats();
    const int64_t calls = clock_calls;
    std::this_thread::sleep_for(milliseconds(30));
    EXPECT_EQ(loop.stats().steps, before.steps);
    EXPECT_EQ(clock_calls, calls);
  }
}

TEST(EngineLoop, QueueBoundCountsWhatWaitsAndNotWhatRuns) {
  Gate gate;
  ExecutorLimits limits = small_limits();
  limits.num_slots = 1;
  FakeExecutor executor(limits);
  executor.before_step = [&](const StepBatch&) {
    gate.pass();
    return Status();
  };
  EngineOptions options = small_options();
  options.max_queue = 2;
  EngineLoop loop(&executor, options);
  std::vector<Request> requests;
  for (uint64_t i = 0; i < 4; ++i) requests.push_back(make_request(4, 3, i));
  ASSERT_TRUE(loop.submit(requests[0]).ok());
  gate.wait_for_arrival();  // the first one runs
  EXPECT_EQ(loop.stats().running, 1);
  ASSERT_TRUE(loop.submit(requests[1]).ok());
  ASSERT_TRUE(loop.submit(requests[2]).ok());
  EXPECT_EQ(loop.stats().waiting, 2);
  const Status full = loop.submit(requests[3]).status();
  EXPECT_EQ(full.code(), ErrorCode::kUnavailable);
  EXPECT_THAT(full.message(), HasSubstr("3 requests are running or waiting"));
  gate.open();
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(sink_of(requests[static_cast<size_t>(i)]).wait_finished());
  }
  EXPECT_TRUE(becomes_idle(loop));
  EXPECT_TRUE(loop.submit(requests[3]).ok());
  EXPECT_TRUE(sink_of(requests[3]).wait_finished());
}

TEST(EngineLoop, AnInvalidRequestIsRefusedOnTheCallersThread) {
  FakeExecutor executor(small_limits());
  EngineLoop loop(&executor, small_options());
  Request r = make_request(4, 3, 1);
  r.sampling.max_tokens = INT64_MAX;
  EXPECT_EQ(loop.validate(r).code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(loop.submit(r).status().code(), ErrorCode::kInvalidArgument);
  r = make_request(4, 3, 1);
  r.sink = nullptr;
  EXPECT_TRUE(loop.validate(r).ok());
  EXPECT_EQ(loop.submit(r).status().code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(loop.options().max_num_seqs, 8);
}

TEST(EngineLoop, CancelFromAnyThreadAndFromTheSinkItself) {
  FakeExecutor executor(small_limits());
  executor.delay = std::chrono::microseconds(200);
  EngineLoop loop(&executor, small_options());
  Request other = make_request(10, 40, 1), victim = make_request(10, 1000, 2);
  ASSERT_TRUE(loop.submit(other).ok());
  const Result<RequestId> id = loop.submit(victim);
  ASSERT_TRUE(id.ok());
  ASSERT_TRUE(sink_of(victim).wait_tokens(3));
  loop.cancel(*id);
  ASSERT_TRUE(sink_of(victim).wait_finished());
  EXPECT_EQ(sink_of(victim).finish().reason, FinishReason::kCancelled);

  Request self = make_request(10, 1000, 3);
  std::atomic<RequestId> self_id{0};
  sink_of(self).hook = [&](const TokenOutput&) {
    if (self_id != 0) loop.cancel(self_id);
    return true;
  };
  self_id = *loop.submit(self);
  ASSERT_TRUE(sink_of(self).wait_finished());
  EXPECT_EQ(sink_of(self).finish().reason, FinishReason::kCancelled);
  ASSERT_TRUE(sink_of(other).wait_finished());
  EXPECT_EQ(sink_of(other).tokens(), greedy_by_hand(other.prompt, 40));
}

TEST(EngineLoop, DrainWaitsForTheLastAndRefusesNewOnes) {
  FakeExecutor executor(small_limits());
  executor.delay = std::chrono::microseconds(500);
  EngineLoop loop(&executor, small_options());
  std::vector<Request> requests;
  for (uint64_t i = 0; i < 12; ++i) {
    requests.push_back(make_request(10, 20, i));
    ASSERT_TRUE(loop.submit(requests.back()).ok());
  }
  std::thread late([&] {
    for (int i = 0; i < 2000; ++i) {
      const Request r = make_request(4, 1, 5);
      const Status status = loop.submit(r).status();
      if (!status.ok()) {
        EXPECT_EQ(status.code(), ErrorCode::kUnavailable);
        EXPECT_THAT(status.message(), HasSubstr("shutting down"));
        EXPECT_EQ(loop.validate(r).code(), ErrorCode::kUnavailable);
        return;
      }
      std::this_thread::sleep_for(milliseconds(1));
    }
    ADD_FAILURE() << "drain never refused";
  });
  EXPECT_TRUE(loop.drain(30));
  late.join();
  for (const Request& r : requests) {
    EXPECT_EQ(sink_of(r).finish().reason, FinishReason::kLength);
  }
  EXPECT_TRUE(loop.drain(0));  // nothing left: at once
}

TEST(EngineLoop, DrainThatRunsOutOfPatienceCancelsTheRest) {
  FakeExecutor executor(small_limits());
  executor.delay = milliseconds(2);
  EngineLoop loop(&executor, small_options());
  std::vector<Request> requests;
  for (uint64_t i = 0; i < 12; ++i) {
    requests.push_back(make_request(10, 1900, i));
    requests.back().sampling.max_tokens = i == 0 ? 1 : 400;
    ASSERT_TRUE(loop.submit(requests.back()).ok());
  }
  EXPECT_FALSE(loop.drain(0.03));
  for (size_t i = 0; i < requests.size(); ++i) {
    EXPECT_EQ(sink_of(requests[i]).num_finishes(), 1);
    if (i == 0) continue;
    EXPECT_EQ(sink_of(requests[i]).finish().reason, FinishReason::kCancelled);
  }
  EXPECT_EQ(loop.stats().running + loop.stats().waiting, 0);
  EXPECT_EQ(loop.stats().slots_free, 8);
}

TEST(EngineLoop, DestructionCancelsRunningQueuedAndUnseen) {
  Gate gate;
  FakeExecutor executor(small_limits());
  executor.before_step = [&](const StepBatch&) {
    gate.pass();
    return Status();
  };
  std::vector<Request> requests;
  std::thread opener;
  {
    EngineLoop loop(&executor, small_options());
    for (uint64_t i = 0; i < 20; ++i) {
      requests.push_back(make_request(10, 40, i));
      ASSERT_TRUE(loop.submit(requests.back()).ok());
      if (i == 0) gate.wait_for_arrival();  // the rest stays in the inbox
    }
    opener = std::thread([&] {
      std::this_thread::sleep_for(milliseconds(20));
      gate.open();
    });
  }
  opener.join();
  for (const Request& r : requests) {
    EXPECT_EQ(sink_of(r).num_finishes(), 1);
    EXPECT_EQ(sink_of(r).finish().reason, FinishReason::kCancelled);
  }
}

TEST(EngineLoop, AFatalErrorShowsInHealthAndEveryRequestHearsOfIt) {
  Gate gate;
  FakeExecutor executor(small_limits());
  executor.before_step = [&](const StepBatch&) -> Status {
    if (executor.num_steps < 3) return {};
    gate.pass();
    return {ErrorCode::kRankLost, "rank 3 is gone"};
  };
  EngineLoop loop(&executor, small_options());
  EXPECT_TRUE(loop.health().ok());
  const Request running = make_request(10, 40, 1), unseen = make_request(10, 40, 2);
  ASSERT_TRUE(loop.submit(running).ok());
  gate.wait_for_arrival();
  ASSERT_TRUE(loop.submit(unseen).ok());  // accepted while the step is failing
  gate.open();
  for (const Request* r : {&running, &unseen}) {
    ASSERT_TRUE(sink_of(*r).wait_finished());
    EXPECT_EQ(sink_of(*r).finish().reason, FinishReason::kError);
    EXPECT_EQ(sink_of(*r).finish().error.code(), ErrorCode::kRankLost);
  }
  ASSERT_TRUE(becomes_idle(loop));
  EXPECT_EQ(loop.health().code(), ErrorCode::kRankLost);
  const Status refused = loop.submit(make_request(4, 4, 3)).status();
  EXPECT_EQ(refused.code(), ErrorCode::kUnavailable);
  EXPECT_THAT(refused.message(), HasSubstr("rank 3 is gone"));
  EXPECT_EQ(loop.validate(make_request(4, 4, 3)).code(), ErrorCode::kUnavailable);
  EXPECT_TRUE(loop.drain(5));
  EXPECT_EQ(sink_of(running).num_finishes(), 1);
}

TEST(EngineLoop, SubmitAndCancelRacesEndEveryRequestOnce) {
  FakeExecutor executor(small_limits());
  {
    EngineLoop loop(&executor, small_options());
    std::vector<std::thread> threads;
    std::atomic<int> cancelled{0}, completed{0};
    for (uint64_t t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        uint64_t dice = t;
        std::vector<Request> requests;
        for (int i = 0; i < 100; ++i) {
          dice = mix(dice);
          const Request r = make_request(1 + static_cast<int64_t>(dice % 200),
                                         1 + static_cast<int64_t>(dice >> 8 & 15), dice);
          const Result<RequestId> id = loop.submit(r);
          ASSERT_TRUE(id.ok());
          requests.push_back(r);
          if (dice >> 16 & 1) {
            if (dice >> 17 & 1) std::this_thread::sleep_for(std::chrono::microseconds(dice % 2000));
            loop.cancel(*id);
          }
        }
        for (const Request& r : requests) {
          ASSERT_TRUE(sink_of(r).wait_finished());
          EXPECT_FALSE(sink_of(r).out_of_order());
          const std::vector<int32_t> tokens = sink_of(r).tokens();
          EXPECT_EQ(tokens, greedy_by_hand(r.prompt, static_cast<int64_t>(tokens.size())));
          const bool was = sink_of(r).finish().reason == FinishReason::kCancelled;
          ++(was ? cancelled : completed);
        }
        for (const Request& r : requests) EXPECT_EQ(sink_of(r).num_finishes(), 1);
      });
    }
    for (std::thread& t : threads) t.join();
    EXPECT_TRUE(becomes_idle(loop));
    EXPECT_EQ(loop.stats().slots_free, 8);
    EXPECT_EQ(loop.stats().pages_free, 64);
    EXPECT_GT(cancelled, 0);
    EXPECT_GT(completed, 0);
  }
  EXPECT_THAT(executor.violations, testing::IsEmpty());
}

}  // namespace
}  // namespace k3
