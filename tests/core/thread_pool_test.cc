// The pool: each item once, a barrier at the end, no wake-up lost. Also run under TSan.
#include "core/thread_pool.h"

#include <gtest/gtest.h>

#include <chrono>
#include <vector>

namespace k3 {
namespace {

TEST(ThreadPool, CallsEachItemOnce) {
  for (const int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    EXPECT_EQ(pool.num_threads(), threads);
    for (const int64_t n : {0, 1, 2, 3, 1000}) {
      std::vector<std::atomic<int>> calls(static_cast<size_t>(n));
      std::atomic<int> bad_thread{0};
      pool.parallel_for(n, [&](int64_t i, int thread) {
        calls.at(static_cast<size_t>(i)).fetch_add(1);
        if (thread < 0 || thread >= threads) bad_thread.fetch_add(1);
      });
      for (const auto& c : calls) ASSERT_EQ(c.load(), 1) << threads << " threads, " << n;
      EXPECT_EQ(bad_thread.load(), 0);
    }
  }
}

// Plain (not atomic) memory: what an item wrote is there when parallel_for returns, and what the
// caller wrote before is there in the items. TSan holds the ordering, the sums hold the values.
TEST(ThreadPool, IsABarrierOnBothSides) {
  ThreadPool pool(3);
  std::vector<int64_t> in(64), out(64);
  for (int64_t job = 0; job < 3000; ++job) {
    for (auto& x : in) x = job;
    pool.parallel_for(
        64, [&](int64_t i, int) { out[static_cast<size_t>(i)] = in[static_cast<size_t>(i)] + i; });
    for (int64_t i = 0; i < 64; ++i) ASSERT_EQ(out[static_cast<size_t>(i)], job + i);
  }
}

// Two items never share a thread's scratch at the same time.
TEST(ThreadPool, ThreadNumbersAreExclusive) {
  ThreadPool pool(4);
  std::vector<std::atomic<int>> inside(4);
  std::atomic<int> clashes{0};
  for (int job = 0; job < 200; ++job) {
    pool.parallel_for(40, [&](int64_t, int thread) {
      std::atomic<int>& mine = inside[static_cast<size_t>(thread)];
      if (mine.fetch_add(1) != 0) clashes.fetch_add(1);
      std::this_thread::yield();
      mine.fetch_sub(1);
    });
  }
  EXPECT_EQ(clashes.load(), 0);
}

// Jobs of changing size, back to back: a late worker must never take an item of the next job for
// one of the last, and never miss one.
TEST(ThreadPool, SurvivesHundredThousandShortJobs) {
  for (const int threads : {2, 5}) {
    ThreadPool pool(threads);
    std::atomic<int64_t> sum{0};
    int64_t want = 0;
    for (int64_t job = 0; job < 50000; ++job) {
      const int64_t n = 2 + job % 7;
      const int64_t weight = job;
      pool.parallel_for(n, [&sum, weight](int64_t i, int) {
        sum.fetch_add(weight * (i + 1), std::memory_order_relaxed);
      });
      want += weight * n * (n + 1) / 2;
      ASSERT_EQ(sum.load(), want) << "job " << job << " of " << n;
    }
  }
}

// A pool that has gone to sleep wakes for the next job.
TEST(ThreadPool, WakesAfterSleeping) {
  ThreadPool pool(3);
  for (int job = 0; job < 20; ++job) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    std::atomic<int> count{0};
    pool.parallel_for(50, [&](int64_t, int) { count.fetch_add(1); });
    ASSERT_EQ(count.load(), 50);
  }
}

// Workers take part: with items that wait for each other, one thread alone would never end.
TEST(ThreadPool, ItemsRunAtTheSameTime) {
  ThreadPool pool(3);
  std::atomic<int> arrived{0};
  pool.parallel_for(3, [&](int64_t, int) {
    arrived.fetch_add(1);
    while (arrived.load() < 3) std::this_thread::yield();
  });
  EXPECT_EQ(arrived.load(), 3);
}

// A pool may be used inside another pool's item, thousands of times over.
TEST(ThreadPool, AnotherPoolMayBeUsedInsideAnItem) {
  ThreadPool outer(2), inner(3);
  std::atomic<int64_t> sum{0};
  for (int job = 0; job < 3000; ++job) {
    outer.parallel_for(2, [&](int64_t i, int) {
      if (i != 0) return;  // one caller at a time
      inner.parallel_for(4, [&](int64_t j, int) { sum.fetch_add(j); });
    });
  }
  EXPECT_EQ(sum.load(), 3000 * 6);
}

TEST(ThreadPool, StartsAndStopsWithoutWork) {
  for (int i = 0; i < 200; ++i) {
    ThreadPool pool(1 + i % 5);
    if (i % 3 == 0) pool.parallel_for(3, [](int64_t, int) {});
  }
}

TEST(AvailableCores, IsAtLeastOne) { EXPECT_GE(available_cores(), 1); }

}  // namespace
}  // namespace k3
