#include "engine/scheduler.h"

#include <gtest/gtest.h>

#include <map>
#include <memory>

namespace k3 {
namespace {

std::unique_ptr<RequestState> make_state(RequestId id, int64_t prompt, int64_t max_tokens = 1) {
  Request request;
  request.prompt.assign(static_cast<size_t>(prompt), 0);
  request.sampling.max_tokens = max_tokens;
  SamplerState sampler(request.sampling, {}, {}, 0);
  return std::make_unique<RequestState>(id, std::move(request), std::move(sampler), 0.0);
}

// What the engine does after a successful step.
void take_in(const std::vector<PlannedSegment>& plan) {
  for (const PlannedSegment& p : plan) {
    p.request->num_computed += p.num_tokens;
    if (p.logits == Logits::kLast) p.request->phase = Phase::kDecode;
  }
}

std::map<RequestId, int64_t> rows_by_id(const std::vector<PlannedSegment>& plan) {
  std::map<RequestId, int64_t> rows;
  for (const PlannedSegment& p : plan) rows[p.request->id] += p.num_tokens;
  return rows;
}

TEST(IdPool, TakesAllOrNothingAndReusesTheLastReturned) {
  IdPool pool(3);
  std::vector<int32_t> a, b;
  EXPECT_TRUE(pool.take(2, &a));
  EXPECT_EQ(a, (std::vector<int32_t>{0, 1}));
  EXPECT_FALSE(pool.take(2, &b));
  EXPECT_TRUE(b.empty());
  EXPECT_EQ(pool.num_free(), 1);
  pool.give_back(a);
  EXPECT_TRUE(pool.take(1, &b));
  EXPECT_EQ(b, (std::vector<int32_t>{1}));
  EXPECT_EQ(pool.total(), 3);
}

TEST(PagesFor, RoundsUpAndDoesNotOverflow) {
  EXPECT_EQ(pages_for(0), 0);
  EXPECT_EQ(pages_for(1), 1);
  EXPECT_EQ(pages_for(64), 1);
  EXPECT_EQ(pages_for(65), 2);
  EXPECT_EQ(pages_for(INT64_MAX), INT64_MAX / 64 + 1);
}

TEST(Scheduler, DecodeRowsComeFirstAndPrefillTakesTheRest) {
  Scheduler scheduler(4, 10, 4, 100);
  auto a = make_state(1, 3, 9), b = make_state(2, 2, 9), c = make_state(3, 200, 9);
  scheduler.enqueue(a.get());
  scheduler.enqueue(b.get());
  scheduler.admit();
  take_in(scheduler.plan());
  scheduler.enqueue(c.get());
  scheduler.admit();
  const auto plan = scheduler.plan();
  ASSERT_EQ(plan.size(), 3u);
  EXPECT_EQ(plan[0].request, a.get());
  EXPECT_EQ(plan[1].request, b.get());
  EXPECT_EQ(plan[0].num_tokens + plan[1].num_tokens, 2);
  EXPECT_EQ(plan[2].request, c.get());
  EXPECT_EQ(plan[2].num_tokens, 8);
  EXPECT_EQ(plan[2].logits, Logits::kNone);
}

TEST(Scheduler, TurnsEndOnPageBoundariesAndAnInterruptedTurnGoesOnFirst) {
  Scheduler scheduler(2, 100, 2, 100);
  auto a = make_state(1, 1000), b = make_state(2, 1000);
  scheduler.enqueue(a.get());
  scheduler.enqueue(b.get());
  scheduler.admit();
  auto plan = scheduler.plan();
  EXPECT_EQ(rows_by_id(plan), (std::map<RequestId, int64_t>{{1, 64}, {2, 36}}));
  take_in(plan);
  plan = scheduler.plan();  // 28 end b's turn, 64 to a, 8 to b
  EXPECT_EQ(rows_by_id(plan), (std::map<RequestId, int64_t>{{1, 64}, {2, 36}}));
  take_in(plan);
  plan = scheduler.plan();  // 56 to b, 44 to a
  EXPECT_EQ(rows_by_id(plan), (std::map<RequestId, int64_t>{{1, 44}, {2, 56}}));
}

TEST(Scheduler, ALonePromptGetsEveryRow) {
  Scheduler scheduler(4, 1000, 4, 100);
  auto a = make_state(1, 900);
  scheduler.enqueue(a.get());
  scheduler.admit();
  const auto plan = scheduler.plan();
  ASSERT_EQ(plan.size(), 1u);
  EXPECT_EQ(plan[0].num_tokens, 900);
  EXPECT_EQ(plan[0].logits, Logits::kLast);
}

TEST(Scheduler, AGiantDelaysAShortPromptByItsTurnsAndNotByItsLength) {
  constexpr int64_t kRows = 128, kGiants = 3, kShort = 150;
  Scheduler scheduler(8, kRows, 8, 10000);
  std::vector<std::unique_ptr<RequestState>> giants;
  for (int64_t i = 0; i < kGiants; ++i) {
    giants.push_back(make_state(static_cast<RequestId>(10 + i), 10000));
    scheduler.enqueue(giants.back().get());
  }
  scheduler.admit();
  take_in(scheduler.plan());
  auto brief = make_state(1, kShort);
  scheduler.enqueue(brief.get());
  scheduler.admit();
  int64_t steps = 0;
  while (brief->phase != Phase::kDecode) {
    take_in(scheduler.plan());
    ++steps;
  }
  // n * ceil(P / 64) turns of at most 64 rows.
  const int64_t turns = (kGiants + 1) * pages_for(kShort);
  EXPECT_LE(steps, (turns * kPageTokens + kRows - 1) / kRows);
  // First come, first served would have run the giants to their ends before it.
  EXPECT_LT(steps, kGiants * 10000 / kRows / 10);
}

TEST(Scheduler, NobodyOvertakesTheHeadOfTheQueue) {
  Scheduler scheduler(4, 64, 4, 10);
  auto running = make_state(1, 64 * 4, 64);  // 5 pages
  auto big = make_state(2, 64 * 5, 64);      // 6 pages: must wait
  auto brief = make_state(3, 1);             // 1 page: would fit
  for (RequestState* r : {running.get(), big.get(), brief.get()}) scheduler.enqueue(r);
  scheduler.admit();
  EXPECT_EQ(running->phase, Phase::kPrefill);
  EXPECT_EQ(big->phase, Phase::kWaiting);
  EXPECT_EQ(brief->phase, Phase::kWaiting);
  scheduler.remove(running.get());
  scheduler.admit();
  EXPECT_EQ(big->phase, Phase::kPrefill);
  EXPECT_EQ(brief->phase, Phase::kPrefill);
}

TEST(Scheduler, RemoveFreesFromEveryStage) {
  Scheduler scheduler(2, 64, 2, 10);
  auto decoding = make_state(1, 10), prefilling = make_state(2, 300), waiting = make_state(3, 10);
  for (RequestState* r : {decoding.get(), prefilling.get(), waiting.get()}) scheduler.enqueue(r);
  scheduler.admit();
  take_in(scheduler.plan());
  ASSERT_EQ(decoding->phase, Phase::kDecode);
  ASSERT_EQ(prefilling->phase, Phase::kPrefill);
  ASSERT_EQ(waiting->phase, Phase::kWaiting);
  for (RequestState* r : {waiting.get(), prefilling.get(), decoding.get()}) scheduler.remove(r);
  EXPECT_EQ(scheduler.slots().num_free(), 2);
  EXPECT_EQ(scheduler.pages().num_free(), 10);
  EXPECT_EQ(scheduler.num_running() + scheduler.num_waiting(), 0);
  EXPECT_TRUE(scheduler.plan().empty());
}

TEST(Scheduler, EveryRunningRequestHasARowHoweverFewThereAre) {
  Scheduler scheduler(3, 3, 3, 100);
  auto a = make_state(1, 1, 9), b = make_state(2, 1, 9), c = make_state(3, 5, 9);
  for (RequestState* r : {a.get(), b.get(), c.get()}) scheduler.enqueue(r);
  scheduler.admit();
  for (int i = 0; i < 6; ++i) take_in(scheduler.plan());
  EXPECT_EQ(c->phase, Phase::kDecode);
  EXPECT_EQ(rows_by_id(scheduler.plan()), (std::map<RequestId, int64_t>{{1, 1}, {2, 1}, {3, 1}}));
}

}  // namespace
}  // namespace k3
