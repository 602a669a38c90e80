// A row stands alone: the bits of a token's logits depend on its own sequence and on nothing else.
// k3-nano has 13 layers and four snapshots; every test runs two rows or more.
#include <cmath>
#include <random>

#include "gates/model_fixture.h"

namespace k3::gates {
namespace {

class Bitwise : public ::testing::TestWithParam<Numerics> {
 protected:
  static const Model& nano() {
    static const Model m = Model::open(kNano);
    return m;
  }
};
INSTANTIATE_TEST_SUITE_P(Policies, Bitwise, ::testing::Values(Numerics::kF32, Numerics::kBf16),
                         [](const auto& param) { return numerics_name(param.param); });

TEST_P(Bitwise, ChunkingChangesNothing) {
  const auto ids = random_ids(193, 1);
  const auto e = nano().executor(options(GetParam()));
  const auto want = feed(*e, ids, 1);
  for (const int64_t chunk : {16, 64, 65, 193}) {
    EXPECT_TRUE(same_bits(feed(*e, ids, chunk), want)) << "chunk " << chunk;
  }
}

TEST_P(Bitwise, ThreadsChangeNothing) {
  const auto ids = random_ids(130, 2);
  const auto want = feed(*nano().executor(options(GetParam(), 1)), ids, 64);
  for (const int threads : {2, 3, 5}) {
    EXPECT_TRUE(same_bits(feed(*nano().executor(options(GetParam(), threads)), ids, 64), want))
        << threads << " threads";
  }
}

TEST_P(Bitwise, InstructionSetChangesNothing) {
  const auto ids = random_ids(70, 3);
  CpuExecutorOptions o = options(GetParam());
  o.isa = "portable";
  const auto want = feed(*nano().executor(o), ids, 64);
  for (const char* isa : {"avx2", "avx512"}) {
    if (!select_kernels(isa).ok()) {
      std::printf("%s: not on this machine, skipped\n", isa);
      continue;
    }
    o.isa = isa;
    EXPECT_TRUE(same_bits(feed(*nano().executor(o), ids, 64), want)) << isa;
  }
}

TEST_P(Bitwise, PermutedPagesChangeNothing) {
  const auto ids = random_ids(200, 4);
  const auto e = nano().executor(options(GetParam()));
  const auto want = feed(*e, ids, 50);
  EXPECT_TRUE(same_bits(feed(*e, ids, 50, 0, {61, 3, 40, 8}), want));
  EXPECT_TRUE(same_bits(feed(*e, ids, 50, 0, {2, 1, 0, 63}), want));
}

TEST_P(Bitwise, RecycledSlotsAndPagesFullOfNanChangeNothing) {
  const auto ids = random_ids(150, 5);
  CpuExecutorOptions o = options(GetParam());
  o.num_slots = 2;
  o.max_rows = 64;
  o.num_pages = 8;
  const auto e = nano().executor(o);
  const auto want = feed(*e, ids, 64);
  e->poison(NAN);
  EXPECT_TRUE(same_bits(feed(*e, ids, 64), want));
  e->poison(INFINITY);
  EXPECT_TRUE(same_bits(feed(*e, ids, 33, 1, {7, 6, 5}), want));
}

// 33 sequences of uneven length in shuffled slots and scattered pages, prefill chunks mixed with
// decode rows in every step, joining at different times; each must equal its own lonely run.
TEST_P(Bitwise, MixedBatchesOfUpTo33SlotsChangeNothing) {
  constexpr int kSequences = 33;
  std::mt19937 random(6);
  CpuExecutorOptions lonely = options(GetParam());
  const auto alone = nano().executor(lonely);
  CpuExecutorOptions o = options(GetParam());
  o.num_slots = kSequences;
  o.num_pages = 2 * kSequences;
  const auto together = nano().executor(o);

  struct Sequence {
    std::vector<int32_t> ids, pages;
    std::vector<float> want, got;
    int64_t at = 0;
    int slot = 0, joins = 0;
  };
  std::vector<Sequence> all(kSequences);
  std::vector<int> slots(kSequences);
  std::iota(slots.begin(), slots.end(), 0);
  std::shuffle(slots.begin(), slots.end(), random);
  std::vector<int32_t> pages(2 * kSequences);
  std::iota(pages.begin(), pages.end(), 0);
  std::shuffle(pages.begin(), pages.end(), random);
  for (size_t s = 0; s < all.size(); ++s) {
    all[s].ids =
        random_ids(30 + static_cast<int64_t>(random() % 60), 100 + static_cast<uint32_t>(s));
    all[s].want = feed(*alone, all[s].ids, 512);
    all[s].slot = slots[s];
    all[s].pages = {pages[2 * s], pages[2 * s + 1]};
    all[s].joins = s < 2 ? 0 : static_cast<int>(random() % 4);
  }
  size_t largest = 0;
  for (int step = 0;; ++step) {
    StepBatch batch;
    std::vector<size_t> who;
    for (size_t s = 0; s < all.size(); ++s) {
      Sequence& q = all[s];
      const auto left = static_cast<int64_t>(q.ids.size()) - q.at;
      if (left == 0 || q.joins > step) continue;
      const int64_t n = std::min<int64_t>(left, random() % 2 == 0 ? 1 : 1 + random() % 14);
      batch.segments.push_back(
          {q.slot, q.at, {q.ids.data() + q.at, static_cast<size_t>(n)}, q.pages, Logits::kAll});
      who.push_back(s);
    }
    if (who.empty()) break;
    // The order of segments is nobody's business either.
    if (step % 2 == 1) {
      std::reverse(batch.segments.begin(), batch.segments.end());
      std::reverse(who.begin(), who.end());
    }
    largest = std::max(largest, who.size());
    StepResult result;
    const Status status = together->step(batch, &result);
    ASSERT_TRUE(status.ok()) << status.message();
    int64_t row = 0;
    for (size_t i = 0; i < who.size(); ++i) {
      Sequence& q = all[who[i]];
      for (size_t t = 0; t < batch.segments[i].tokens.size(); ++t, ++row) {
        const auto logits = result.row(row);
        q.got.insert(q.got.end(), logits.begin(), logits.end());
      }
      q.at += static_cast<int64_t>(batch.segments[i].tokens.size());
    }
  }
  EXPECT_EQ(largest, 33u);
  for (size_t s = 0; s < all.size(); ++s) {
    EXPECT_TRUE(same_bits(all[s].got, all[s].want)) << "sequence " << s;
  }
}

// The control: were a neighbour's token to leak into a row, these comparisons would see it.
TEST_P(Bitwise, ControlAnotherTokenInTheHistoryIsSeen) {
  auto ids = random_ids(100, 7);
  const auto e = nano().executor(options(GetParam()));
  const auto want = feed(*e, ids, 64);
  ids[40] = (ids[40] + 1) % 1792;
  const auto got = feed(*e, ids, 64);
  EXPECT_TRUE(same_bits({got.data(), 40 * 2048}, {want.data(), 40 * 2048}));
  for (size_t row = 40; row < 100; ++row) {
    EXPECT_FALSE(same_bits({got.data() + row * 2048, 2048}, {want.data() + row * 2048, 2048}))
        << "row " << row;
  }
}

TEST_P(Bitwise, ControlAStaleStateIsSeen) {
  const auto ids = random_ids(80, 8);
  const auto e = nano().executor(options(GetParam()));
  const auto want = feed(*e, ids, 80);
  // The same tokens at positions 80..159 follow another history: nothing may be equal.
  const std::vector<int32_t> pages = iota_pages(160);
  StepResult result;
  ASSERT_TRUE(e->step({{{0, 80, ids, pages, Logits::kAll}}}, &result).ok());
  EXPECT_FALSE(same_bits(result.row(79), {want.data() + 79 * 2048, 2048}));
}

// ---- what the contract refuses, without harm to the slots ----

TEST(StepContract, BadSegmentsAreRefusedByNameAndChangeNothing) {
  const Model m = Model::open(kNano);
  CpuExecutorOptions o = options();
  o.num_slots = 2;
  o.max_rows = 64;
  o.max_logit_rows = 8;
  o.num_pages = 4;
  const auto e = m.executor(o);
  const auto ids = random_ids(40, 9);
  const std::vector<int32_t> pages = {0, 1}, other = {2, 3}, outside = {0, 4}, none;
  const std::span<const int32_t> tokens = ids;
  const std::vector<int32_t> bad_token = {5, 2048}, negative = {-1};
  StepResult result;
  ASSERT_TRUE(e->step({{{0, 0, tokens.first(32), pages, Logits::kLast}}}, &result).ok());
  const auto refused = [&](const StepBatch& batch, const char* expected) {
    const Status s = e->step(batch, &result);
    EXPECT_EQ(s.code(), ErrorCode::kInvalidArgument);
    EXPECT_NE(s.message().find(expected), std::string::npos) << s.message();
  };
  const auto some = tokens.subspan(32, 2);
  refused({{{2, 0, some, pages, Logits::kLast}}}, "slot 2, expected [0, 2)");
  refused({{{-1, 0, some, pages, Logits::kLast}}}, "slot -1");
  refused({{{0, 31, some, pages, Logits::kLast}}}, "position 31, expected 0 or 32");
  refused({{{0, 33, some, pages, Logits::kLast}}}, "position 33, expected 0 or 32");
  refused({{{0, 32, tokens.first(0), pages, Logits::kLast}}}, "no tokens");
  refused({{{0, 32, bad_token, pages, Logits::kLast}}}, "token 2048, expected [0, 2048)");
  refused({{{0, 32, negative, pages, Logits::kLast}}}, "token -1");
  refused({{{0, 32, some, none, Logits::kLast}}}, "0 pages, expected at least 1");
  refused({{{0, 32, tokens, outside, Logits::kLast}}}, "page 4, expected [0, 4)");
  refused({{{0, 32, some, pages, Logits::kLast}, {0, 0, some, other, Logits::kLast}}},
          "slot 0 appears twice");
  refused({{{0, 32, some, pages, Logits::kLast}, {1, 0, some, pages, Logits::kLast}}},
          "page 0 appears twice");
  refused({{{0, 32, tokens, pages, Logits::kLast}, {1, 0, tokens, other, Logits::kLast}}},
          "80 rows, expected at most 64");
  refused({{{0, 32, tokens.first(9), pages, Logits::kAll}}},
          "9 rows of logits, expected at most 8");
  // The slot still stands at 32 and goes on as if nothing had happened.
  ASSERT_TRUE(e->step({{{0, 32, tokens.subspan(32), pages, Logits::kAll}}}, &result).ok());
  const auto want = feed(*m.executor(options()), ids, 40);
  EXPECT_TRUE(same_bits(result.logits, {want.data() + 32 * 2048, 8 * 2048}));
}

}  // namespace
}  // namespace k3::gates
