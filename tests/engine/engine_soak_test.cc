// Random arrivals, cancellations, poisoned rows and failing steps, with the books checked after
// every step.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <set>

#include "engine/engine.h"
#include "engine/page_pool.h"
#include "recording_sink.h"

namespace k3 {
namespace {

struct Live {
  RequestId id;
  Request request;
  bool cancelled = false;
};

class Soak {
 public:
  explicit Soak(uint64_t seed) : state_(seed), executor_(limits()), engine_(&executor_, options()) {
    executor_.on_row = [this](const StepBatch&, const Segment&, std::span<float> row) {
      if (chance(0.002)) row[dice(256)] = std::numeric_limits<float>::quiet_NaN();
    };
    executor_.before_step = [this](const StepBatch&) -> Status {
      if (chance(0.01)) return {ErrorCode::kInternal, "hiccup"};
      return {};
    };
  }

  void run(int num_steps) {
    for (int i = 0; i < num_steps; ++i) {
      const uint64_t arrivals = chance(0.1) ? 12 : dice(2);
      for (uint64_t j = 0; j < arrivals; ++j) arrive();
      while (!live_.empty() && chance(0.08)) {
        Live& victim = live_[dice(live_.size())];
        victim.cancelled = true;
        engine_.cancel(victim.id);
        ASSERT_TRUE(sink_of(victim.request).finished());
      }
      ASSERT_TRUE(engine_.step().ok());
      check_books();
      if (testing::Test::HasFatalFailure()) return;
    }
    ASSERT_TRUE(run_to_end(&engine_));
    check_books();
    const EngineStats stats = engine_.stats();
    EXPECT_EQ(stats.running + stats.waiting, 0);
    EXPECT_EQ(stats.slots_free, limits().num_slots);
    EXPECT_EQ(stats.pages_free, limits().num_pages);
    EXPECT_THAT(executor_.violations, testing::IsEmpty());
    EXPECT_TRUE(live_.empty());
    // Every kind of end was met, and they add up.
    EXPECT_GT(stats.finished_length, 100);
    EXPECT_GT(stats.finished_cancelled, 20);
    EXPECT_GT(stats.finished_error, 5);
    EXPECT_GT(refused_, 0);
    EXPECT_EQ(stats.finished_stop + stats.finished_length + stats.finished_cancelled +
                  stats.finished_error,
              submitted_);
  }

 private:
  static ExecutorLimits limits() {
    ExecutorLimits limits = small_limits();
    limits.num_pages = 24;
    return limits;
  }
  static EngineOptions options() {
    EngineOptions options = small_options();
    options.max_queue = 8;
    return options;
  }

  uint64_t dice(uint64_t n) { return (state_ = mix(state_)) % n; }
  bool chance(double p) { return static_cast<double>(dice(1 << 20)) < p * (1 << 20); }

  void arrive() {
    const int64_t prompt = 1 + static_cast<int64_t>(chance(0.1) ? dice(1000) : dice(60));
    Request r = make_request(prompt, 1 + static_cast<int64_t>(dice(12)), dice(1000));
    const Result<RequestId> id = engine_.submit(r);
    if (id.ok()) {
      ++submitted_;
      live_.push_back({*id, r});
    } else {
      ASSERT_EQ(id.status().code(), ErrorCode::kUnavailable);
      ++refused_;
    }
  }

  void check_books() {
    std::erase_if(live_, [](const Live& l) {
      RecordingSink& sink = sink_of(l.request);
      if (!sink.finished()) return false;
      EXPECT_EQ(sink.num_finishes(), 1);
      EXPECT_FALSE(sink.out_of_order());
      const FinishInfo finish = sink.finish();
      const std::vector<int32_t> tokens = sink.tokens();
      EXPECT_EQ(finish.reason == FinishReason::kCancelled, l.cancelled);
      if (finish.reason == FinishReason::kLength) {
        EXPECT_EQ(static_cast<int64_t>(tokens.size()), l.request.sampling.max_tokens);
      }
      // Whatever came, came right.
      EXPECT_EQ(tokens, greedy_by_hand(l.request.prompt, static_cast<int64_t>(tokens.size())));
      return true;
    });
    const EngineStats stats = engine_.stats();
    ASSERT_EQ(stats.running + stats.waiting, static_cast<int64_t>(live_.size()));
    ASSERT_EQ(stats.slots_free, limits().num_slots - stats.running);
    int64_t most_pages = 0;
    for (const Live& l : live_) {
      most_pages +=
          pages_for(static_cast<int64_t>(l.request.prompt.size()) + l.request.sampling.max_tokens);
    }
    ASSERT_GE(stats.pages_free, limits().num_pages - most_pages);
    if (stats.waiting == 0) {
      ASSERT_EQ(stats.pages_free, limits().num_pages - most_pages);
    }
  }

  uint64_t state_;
  FakeExecutor executor_;
  Engine engine_;
  std::vector<Live> live_;
  int64_t submitted_ = 0, refused_ = 0;
};

TEST(EngineSoak, RandomArrivalsCancelsAndFailuresLeakNothingAndSpoilNobody) {
  for (uint64_t seed : {1, 2, 3}) Soak(seed).run(1200);
}

}  // namespace
}  // namespace k3
