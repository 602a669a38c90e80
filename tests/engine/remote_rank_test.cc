// A rank behind messages answers as the engine itself does.
#include "engine/remote_rank.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <condition_variable>
#include <deque>
#include <limits>
#include <mutex>
#include <thread>

#include "engine/rank_router.h"
#include "recording_sink.h"

namespace k3 {
namespace {

using testing::HasSubstr;

// One direction of a connection: keeps the order, delivers on a thread of its own.
class Wire {
 public:
  explicit Wire(std::function<void(const std::string&)> deliver)
      : deliver_(std::move(deliver)), thread_([this] { run(); }) {}
  ~Wire() {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_one();
    thread_.join();
  }
  void send(const std::string& message) {
    {
      std::lock_guard lock(mutex_);
      queue_.push_back(message);
    }
    wake_.notify_one();
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return stop_ || !queue_.empty(); });
      if (queue_.empty()) return;
      const std::string message = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      deliver_(message);
      lock.lock();
    }
  }
  std::function<void(const std::string&)> deliver_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::string> queue_;
  bool stop_ = false;
  std::thread thread_;
};

// Two engines: one here, one behind wires.
struct Pair {
  explicit Pair(const EngineOptions& options = small_options())
      : here(&here_executor, options),
        there(std::make_unique<EngineLoop>(&there_executor, unbounded(options))),
        server(there.get(), [this](const std::string& m) { from_rank->send(m); }),
        remote(&here, [this](const std::string& m) { to_rank->send(m); }) {
    to_rank = std::make_unique<Wire>([this](const std::string& m) { server.receive(m); });
    from_rank = std::make_unique<Wire>([this](const std::string& m) { remote.receive(m); });
  }
  ~Pair() {  // each end stays until nobody can send to it
    remote.drain(0);
    to_rank.reset();
    there.reset();
    from_rank.reset();
  }

  static EngineOptions unbounded(EngineOptions options) {
    options.max_queue = std::numeric_limits<int64_t>::max();
    return options;
  }

  FakeExecutor here_executor{small_limits()}, there_executor{small_limits()};
  std::unique_ptr<Wire> to_rank, from_rank;
  EngineLoop here;
  std::unique_ptr<EngineLoop> there;
  RankServer server;
  RemoteRank remote;
};

TEST(RemoteRank, TokensAndFinishAreTheEnginesOwn) {
  Pair pair;
  std::vector<Request> requests;
  for (uint64_t i = 0; i < 20; ++i) {
    requests.push_back(make_request(1 + static_cast<int64_t>(i * 7 % 90), 5 + i % 4, i));
    ASSERT_TRUE(pair.remote.submit(requests.back()).ok());
  }
  for (const Request& r : requests) {
    ASSERT_TRUE(sink_of(r).wait_finished());
    EXPECT_EQ(sink_of(r).tokens(), greedy_by_hand(r.prompt, r.sampling.max_tokens));
    EXPECT_EQ(sink_of(r).finish().reason, FinishReason::kLength);
    EXPECT_EQ(sink_of(r).finish().stats.prompt_tokens, static_cast<int64_t>(r.prompt.size()));
    EXPECT_EQ(sink_of(r).finish().stats.completion_tokens, r.sampling.max_tokens);
    EXPECT_FALSE(sink_of(r).out_of_order());
  }
  EXPECT_TRUE(pair.remote.drain(10));
  EXPECT_EQ(pair.remote.stats().running + pair.remote.stats().waiting, 0);
  for (int i = 0; i < 5000 && pair.remote.stats().finished_length < 20; ++i) {
    pair.server.report();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_EQ(pair.remote.stats().finished_length, 20);
  EXPECT_EQ(pair.remote.stats().slots_free, 8);
  EXPECT_EQ(pair.here.stats().generated_tokens, 0);
}

// Every parameter travels: a sampled request with all of them set gives what the engine here gives.
TEST(RemoteRank, EverySamplingParameterTravels) {
  Pair pair;
  const auto make = [] {
    Request r = make_request(30, 25, 3);
    SamplingParams& s = r.sampling;
    s.temperature = 0.8f;
    s.top_k = 40;
    s.top_p = 0.93f;
    s.min_p = 0.01f;
    s.presence_penalty = 0.7f;
    s.frequency_penalty = -0.3f;
    s.repetition_penalty = 1.1f;
    s.logit_bias = {{7, 3.5f}, {9, -100.0f}};
    s.seed = 0xFFFFFFFFFFFFFFF1u;
    s.min_tokens = 4;
    s.ignore_eos = false;
    s.stop_token_ids = {11, 12};
    s.logprobs = 3;
    return r;
  };
  const Request a = make(), b = make();
  ASSERT_TRUE(pair.here.submit(a).ok());
  ASSERT_TRUE(pair.remote.submit(b).ok());
  ASSERT_TRUE(sink_of(a).wait_finished());
  ASSERT_TRUE(sink_of(b).wait_finished());
  EXPECT_EQ(sink_of(a).tokens(), sink_of(b).tokens());
  EXPECT_EQ(sink_of(a).finish().reason, sink_of(b).finish().reason);
  EXPECT_EQ(sink_of(a).finish().stop_token, sink_of(b).finish().stop_token);
  const auto tops_a = sink_of(a).tops(), tops_b = sink_of(b).tops();
  ASSERT_EQ(tops_a.size(), tops_b.size());
  for (size_t i = 0; i < tops_a.size(); ++i) {
    ASSERT_EQ(tops_a[i].size(), 3u);
    for (size_t k = 0; k < 3; ++k) {
      EXPECT_EQ(tops_a[i][k].token, tops_b[i][k].token);
      EXPECT_EQ(tops_a[i][k].logprob, tops_b[i][k].logprob);
      EXPECT_EQ(tops_a[i][k].rank, tops_b[i][k].rank);
    }
    EXPECT_EQ(sink_of(a).outputs()[i].chosen.logprob, sink_of(b).outputs()[i].chosen.logprob);
    EXPECT_EQ(sink_of(a).outputs()[i].is_end, sink_of(b).outputs()[i].is_end);
  }
  // The control: a parameter that did not travel would show.
  Request c = make();
  c.sampling.seed = 1;
  ASSERT_TRUE(pair.remote.submit(c).ok());
  ASSERT_TRUE(sink_of(c).wait_finished());
  EXPECT_NE(sink_of(c).tokens(), sink_of(a).tokens());
}

TEST(RemoteRank, AStopStringEndsTheRequestAndLaterTokensAreNotShown) {
  Pair pair;
  pair.there_executor.delay = std::chrono::microseconds(200);
  Request r = make_request(5, 200, 4);
  std::atomic<int> seen{0};
  sink_of(r).hook = [&seen](const TokenOutput&) { return ++seen < 6; };
  ASSERT_TRUE(pair.remote.submit(r).ok());
  ASSERT_TRUE(sink_of(r).wait_finished());
  EXPECT_EQ(sink_of(r).tokens(), greedy_by_hand(r.prompt, 6));
  EXPECT_EQ(sink_of(r).finish().reason, FinishReason::kStop);
  EXPECT_EQ(sink_of(r).finish().stats.completion_tokens, 6);
  EXPECT_TRUE(pair.remote.drain(10));
  EXPECT_LT(pair.there->stats().generated_tokens, 200);
}

TEST(RemoteRank, CancellationReachesTheRank) {
  Pair pair;
  pair.there_executor.delay = std::chrono::microseconds(500);
  const Request r = make_request(5, 1000, 5);
  const Result<RequestId> id = pair.remote.submit(r);
  ASSERT_TRUE(id.ok());
  ASSERT_TRUE(sink_of(r).wait_tokens(3));
  pair.remote.cancel(*id);
  pair.remote.cancel(*id);
  pair.remote.cancel(12345);
  ASSERT_TRUE(sink_of(r).wait_finished());
  EXPECT_EQ(sink_of(r).finish().reason, FinishReason::kCancelled);
  EXPECT_EQ(sink_of(r).num_finishes(), 1);
}

TEST(RemoteRank, RefusalsComeBeforeAnythingIsSent) {
  EngineOptions options = small_options();
  options.max_queue = 1;
  Pair pair(options);
  pair.there_executor.delay = std::chrono::milliseconds(2);
  Request empty = make_request(1, 5, 1);
  empty.prompt.clear();
  EXPECT_EQ(pair.remote.submit(empty).status().code(), ErrorCode::kInvalidArgument);
  std::vector<Request> fill;
  for (uint64_t i = 0; i < 9; ++i) {  // 8 slots and one in the queue
    fill.push_back(make_request(5, 60, i));
    ASSERT_TRUE(pair.remote.submit(fill.back()).ok()) << i;
  }
  const Result<RequestId> more = pair.remote.submit(make_request(5, 5, 99));
  EXPECT_EQ(more.status().code(), ErrorCode::kUnavailable);
  EXPECT_THAT(more.status().message(), HasSubstr("queue is full"));
  EXPECT_EQ(pair.remote.stats().running, 8);
  EXPECT_EQ(pair.remote.stats().waiting, 1);
  for (const Request& r : fill) {
    ASSERT_TRUE(sink_of(r).wait_finished());
    EXPECT_EQ(sink_of(r).finish().reason, FinishReason::kLength);
  }
}

// What the front end has room for, the rank takes: with the queue always at its limit, the rank
// learns of an end later than the front end does.
TEST(RemoteRank, AnAcceptedRequestIsNeverRefusedByTheRank) {
  EngineOptions options = small_options();
  options.max_queue = 0;
  Pair pair(options);
  std::vector<Request> taken;
  for (uint64_t i = 0; taken.size() < 400; ++i) {
    const Request r = make_request(1, 1, i);
    if (pair.remote.submit(r).ok()) taken.push_back(r);
  }
  for (const Request& r : taken) {
    ASSERT_TRUE(sink_of(r).wait_finished());
    EXPECT_EQ(sink_of(r).finish().reason, FinishReason::kLength)
        << sink_of(r).finish().error.message();
  }
}

TEST(RemoteRank, ALostGroupFinishesEveryRequestOnce) {
  Pair pair;
  pair.there_executor.delay = std::chrono::milliseconds(1);
  std::vector<Request> requests;
  for (uint64_t i = 0; i < 5; ++i) {
    requests.push_back(make_request(5, 500, i));
    ASSERT_TRUE(pair.remote.submit(requests.back()).ok());
  }
  ASSERT_TRUE(sink_of(requests[0]).wait_tokens(2));
  pair.remote.fail({ErrorCode::kRankLost, "rank 1 is gone"});
  for (const Request& r : requests) {
    ASSERT_TRUE(sink_of(r).finished());
    EXPECT_EQ(sink_of(r).finish().reason, FinishReason::kError);
    EXPECT_EQ(sink_of(r).finish().error.code(), ErrorCode::kRankLost);
  }
  EXPECT_EQ(pair.remote.health().code(), ErrorCode::kRankLost);
  EXPECT_FALSE(pair.remote.submit(make_request(3, 3, 7)).ok());
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  for (const Request& r : requests) EXPECT_EQ(sink_of(r).num_finishes(), 1);
}

TEST(RemoteRank, AMessageThatDoesNotReadIsAFaultOfTheGroup) {
  Pair pair;
  pair.remote.receive("\xc1 nonsense");
  EXPECT_EQ(pair.remote.health().code(), ErrorCode::kRankLost);
}

TEST(RankRouter, TheLeastLoadedRankGetsTheRequestAndAPinIsObeyed) {
  std::vector<std::unique_ptr<FakeExecutor>> executors;
  std::vector<std::unique_ptr<FrontEnd>> loops;
  for (int r = 0; r < 3; ++r) {
    executors.push_back(std::make_unique<FakeExecutor>(small_limits()));
    executors.back()->delay = std::chrono::milliseconds(1);
    loops.push_back(std::make_unique<EngineLoop>(executors.back().get(), small_options()));
  }
  RankRouter router(std::move(loops));
  std::vector<Request> requests;
  for (uint64_t i = 0; i < 6; ++i) {
    requests.push_back(make_request(5, 300, i));
    ASSERT_TRUE(router.submit(requests.back()).ok());
  }
  for (int r = 0; r < 3; ++r)
    EXPECT_EQ(router.rank_stats(r).running + router.rank_stats(r).waiting, 2);
  for (uint64_t i = 0; i < 2; ++i) {
    requests.push_back(make_request(5, 300, 50 + i));
    requests.back().rank = 2;
    ASSERT_TRUE(router.submit(requests.back()).ok());
  }
  EXPECT_EQ(router.rank_stats(2).running + router.rank_stats(2).waiting, 4);
  Request outside = make_request(5, 3, 60);
  outside.rank = 3;
  EXPECT_THAT(router.submit(outside).status().message(),
              HasSubstr("rank: found 3, expected 0 to 2"));
  EXPECT_EQ(router.stats().running + router.stats().waiting, 8);
  EXPECT_FALSE(router.drain(0));
  for (const Request& r : requests) EXPECT_EQ(sink_of(r).num_finishes(), 1);
}

}  // namespace
}  // namespace k3
