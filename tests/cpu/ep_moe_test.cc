// The MegaMoE contract over ranks: the bits of the masked single-rank chain for every world,
// whatever the other ranks send, and a clear end when a rank does not follow.
#include "cpu/ep_moe.h"

#include <thread>

#include "cpu/masked_chain.h"
#include "cpu/moe_fixture.h"

namespace k3::gate {
namespace {

constexpr int64_t kMaxRows = 80;

// `whole` cut to the experts of one rank.
ModelWeights part_of(const ModelWeights& whole, int64_t world, int64_t rank) {
  ModelWeights part = whole;
  part.num_local_experts = kExperts / world;
  part.first_expert = rank * part.num_local_experts;
  auto& experts = part.layers[0].moe.experts;
  experts = {experts.begin() + part.first_expert,
             experts.begin() + part.first_expert + part.num_local_experts};
  return part;
}

NumericsPolicy policy_of(bool bf16) {
  NumericsPolicy policy;
  policy.numerics = bf16 ? Numerics::kBf16 : Numerics::kF32;
  return policy;
}

std::vector<float> chain(const Model& m, const Call& c, bool bf16) {
  std::vector<float> out = poisoned(c.rows * kLatent);
  MaskedChain oracle(&m.weights, *select_kernels("auto"), bf16);
  EXPECT_TRUE(oracle.run({0, c.rows, c.z.data(), c.ids.data(), c.weights.data(), out.data()}).ok());
  return out;
}

// A group of ranks, each with a thread in run().
class Group {
 public:
  Group(const Model& m, int64_t world, bool bf16, double timeout = 30) : world_(world) {
    group_ = std::move(ThreadGroup::create({world, kMaxRows, kTopK, kLatent}, timeout).value());
    for (int64_t r = 0; r < world; ++r) {
      auto rank = std::make_unique<Rank>();
      rank->weights = part_of(m.weights, world, r);
      rank->moe = std::move(EpMoe::create(&rank->weights, &rank->pool, *select_kernels("auto"),
                                          policy_of(bf16), group_.get(), r)
                                .value());
      ranks_.push_back(std::move(rank));
    }
  }

  ModelWeights& weights(int64_t rank) { return ranks_[static_cast<size_t>(rank)]->weights; }
  EpMoe& moe(int64_t rank) { return *ranks_[static_cast<size_t>(rank)]->moe; }
  EpGroup& group() { return *group_; }

  // calls[rank][n]: rank's n-th call. Returns the combined rows likewise; `pause(rank)` runs before
  // each call.
  std::vector<std::vector<std::vector<float>>> run(
      const std::vector<std::vector<Call>>& calls,
      const std::function<void(int64_t)>& pause = [](int64_t) {}) {
    std::vector<std::vector<std::vector<float>>> out(calls.size());
    std::vector<std::thread> threads;
    for (size_t r = 0; r < calls.size(); ++r) {
      threads.emplace_back([&, r] {
        for (const Call& c : calls[r]) {
          pause(static_cast<int64_t>(r));
          std::vector<float> y = poisoned(c.rows * kLatent);
          const Status s = ranks_[r]->moe->run(
              {0, c.rows, c.z.data(), c.ids.data(), c.weights.data(), y.data()});
          EXPECT_TRUE(s.ok()) << s.message();
          out[r].push_back(std::move(y));
        }
      });
    }
    for (std::thread& t : threads) t.join();
    return out;
  }

 private:
  struct Rank {
    ModelWeights weights;
    ThreadPool pool{1};
    std::unique_ptr<EpMoe> moe;
  };
  int64_t world_;
  std::unique_ptr<ThreadGroup> group_;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

const std::vector<int32_t> kAll = {0, 1, 2, 3, 4, 5};

TEST(EpMoe, EveryWorldGivesTheBitsOfTheChainWhateverThePeersSend) {
  const Model m(90);
  Random random(100);
  for (const bool bf16 : {false, true}) {
    for (const int64_t world : {1, 2, 3, 6}) {
      Group group(m, world, bf16);
      std::vector<std::vector<Call>> calls(static_cast<size_t>(world));
      for (int64_t r = 0; r < world; ++r) {
        // Uneven, some without rows at all; world - 1 is busiest.
        for (const int64_t rows : {r, int64_t{0}, int64_t{70} - 9 * r, 3 * r, int64_t{80}}) {
          calls[static_cast<size_t>(r)].push_back(make_call(random, rows, kAll, bf16));
        }
      }
      const auto got = group.run(calls);
      for (size_t r = 0; r < calls.size(); ++r) {
        for (size_t n = 0; n < calls[r].size(); ++n) {
          EXPECT_SAME_BITS(got[r][n], chain(m, calls[r][n], bf16))
              << "world " << world << " rank " << r << " call " << n;
        }
      }
    }
  }
}

TEST(EpMoe, SkewedRoutingGivesTheBitsOfTheChain) {
  const Model m(90);
  Random random(101);
  // World 2: rank 0 owns 0..2, rank 1 owns 3..5. All rows at one rank; no row at one rank.
  for (const std::vector<int32_t>& experts :
       {std::vector<int32_t>{0, 1, 2}, {3, 4, 5}, {2, 3, 4}}) {
    Group group(m, 2, true);
    std::vector<std::vector<Call>> calls(2);
    for (auto& of_rank : calls) {
      for (int n = 0; n < 3; ++n) of_rank.push_back(make_call(random, 80, experts, true));
    }
    const auto got = group.run(calls);
    for (size_t r = 0; r < 2; ++r) {
      for (size_t n = 0; n < 3; ++n) {
        EXPECT_SAME_BITS(got[r][n], chain(m, calls[r][n], true)) << r << " " << n;
      }
    }
  }
}

TEST(EpMoe, RowsThatChoseNobodyHereDoNotTravel) {
  const Model m(90);
  Random random(102);
  Group group(m, 2, false);
  std::vector<std::vector<Call>> calls(2);
  calls[0].push_back(make_call(random, 40, {0, 1, 2}, false));
  calls[1].push_back(make_call(random, 0, kAll, false));
  group.run(calls);
  EXPECT_EQ(group.group().slab(1).header(0).rows, 0);
  EXPECT_EQ(group.group().slab(0).header(0).rows, 40);
  EXPECT_EQ(group.group().slab(0).header(1).rows, 0);
}

TEST(EpMoe, SlowRanksInAnyOrderChangeNothing) {
  const Model m(90);
  Random random(103);
  std::vector<std::vector<Call>> calls(3);
  for (size_t r = 0; r < 3; ++r) {
    for (int n = 0; n < 40; ++n) {
      calls[r].push_back(make_call(random, (static_cast<int64_t>(r) * 7 + n * 5) % 9, kAll, false));
    }
  }
  for (int64_t slow = 0; slow < 3; ++slow) {
    Group group(m, 3, false);
    const auto got = group.run(calls, [slow](int64_t rank) {
      if (rank == slow) std::this_thread::sleep_for(std::chrono::microseconds(300));
    });
    for (size_t r = 0; r < 3; ++r) {
      for (size_t n = 0; n < 40; ++n) EXPECT_SAME_BITS(got[r][n], chain(m, calls[r][n], false));
    }
  }
}

// ---- negative controls ----

TEST(EpMoe, ControlAFlippedNibbleInOneExpertIsSeen) {
  const Model m(90);
  Random random(104);
  Group group(m, 2, false);
  Mxfp4Matrix& w = group.weights(1).layers[0].moe.experts[0].w2;  // expert 3
  std::vector<std::byte> flipped(w.packed, w.packed + w.rows * w.row_bytes());
  flipped[17] ^= std::byte{0x10};
  w.packed = flipped.data();
  std::vector<std::vector<Call>> calls(2);
  calls[0].push_back(make_call(random, 20, {1, 2, 3}, false));
  calls[1].push_back(make_call(random, 20, {0, 4, 5}, false));
  const auto got = group.run(calls);
  EXPECT_OTHER_BITS(got[0][0], chain(m, calls[0][0], false));
  EXPECT_SAME_BITS(got[1][0], chain(m, calls[1][0], false)) << "nobody there chose expert 3";
}

// Slot order is what the chain combines in; the order in which ranks answer would be another sum.
TEST(EpMoe, ControlCombiningInArrivalOrderIsSeen) {
  const Model m(90);
  Random random(105);
  Call c = make_call(random, 30, kAll, false);
  const auto want = chain(m, c, false);
  // Rank 1's answers first: the slots of each row with experts 3.. moved to the front.
  for (int64_t row = 0; row < c.rows; ++row) {
    const auto at = static_cast<size_t>(row * kTopK);
    std::vector<std::pair<int32_t, float>> slots;
    for (const bool there : {true, false}) {
      for (size_t s = 0; s < kTopK; ++s) {
        if ((c.ids[at + s] >= 3) == there) slots.emplace_back(c.ids[at + s], c.weights[at + s]);
      }
    }
    for (size_t s = 0; s < kTopK; ++s) std::tie(c.ids[at + s], c.weights[at + s]) = slots[s];
  }
  EXPECT_OTHER_BITS(chain(m, c, false), want);
}

// ---- faults ----

TEST(EpMoe, ADroppedPaddingStepEndsTheGroupInTimeAndNamesTheRank) {
  const Model m(90);
  Random random(106);
  Group group(m, 3, false, 0.2);
  const Call c = make_call(random, 4, kAll, false);
  std::vector<float> y0 = poisoned(4 * kLatent), y1 = y0;
  Status s0, s1;
  const auto start = std::chrono::steady_clock::now();
  std::thread rank0([&] {
    s0 = group.moe(0).run({0, 4, c.z.data(), c.ids.data(), c.weights.data(), y0.data()});
  });
  std::thread rank1([&] {
    s1 = group.moe(1).run({0, 4, c.z.data(), c.ids.data(), c.weights.data(), y1.data()});
  });
  rank0.join();
  rank1.join();
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
  for (const Status& s : {s0, s1}) {
    EXPECT_EQ(s.code(), ErrorCode::kRankLost);
    EXPECT_THAT(s.message(), ::testing::AllOf(::testing::HasSubstr("layer 0, call 1"),
                                              ::testing::HasSubstr("from rank 2")));
  }
  EXPECT_EQ(s0.message(), s1.message()) << "one failure, the group's";
  // Whoever comes later is told the same and does not wait.
  EXPECT_TRUE(group.moe(2).peer_waits());
  EXPECT_EQ(group.moe(2).run({0, 0, nullptr, nullptr, nullptr, nullptr}).message(), s0.message());
}

TEST(EpMoe, TheLaunchCountGuardNamesTheRankThatLeftOutACall) {
  Model m(90);
  m.weights.layers.resize(2);
  m.weights.layers[1] = m.weights.layers[0];
  {  // the rank itself notices, before it sends anything
    Group group(m, 2, false);
    Status s0;
    std::thread rank0([&] { s0 = group.moe(0).run({0, 0, nullptr, nullptr, nullptr, nullptr}); });
    const Status s1 = group.moe(1).run({1, 0, nullptr, nullptr, nullptr, nullptr});
    rank0.join();
    EXPECT_EQ(s1.code(), ErrorCode::kRankLost);
    EXPECT_EQ(s1.message(),
              "rank 1, call 1: made for layer 1, expected layer 0: this rank has left out a call");
    EXPECT_EQ(s0.message(), s1.message());
  }
  {  // were its count wrong too, its peers would
    Group group(m, 2, false);
    group.group().slab(0).header(1).layer = 1;
    group.group().publish_dispatch(1, 0, 1);
    const Status s0 = group.moe(0).run({0, 0, nullptr, nullptr, nullptr, nullptr});
    EXPECT_EQ(s0.code(), ErrorCode::kRankLost);
    EXPECT_THAT(s0.message(), ::testing::HasSubstr("rank 0, layer 0, call 1: rank 1 makes it for "
                                                   "layer 1: that rank has left out a call"));
  }
}

TEST(EpMoe, AGroupThatIsNotTheModelsIsRefused) {
  const Model m(90);
  ThreadPool pool(1);
  const Kernels* kernels = *select_kernels("auto");
  const auto refusal = [&](const SlabShape& shape, const ModelWeights& weights) {
    const auto group = std::move(ThreadGroup::create(shape, 1).value());
    const auto moe = EpMoe::create(&weights, &pool, kernels, policy_of(false), group.get(), 1);
    return moe.ok() ? "(accepted)" : moe.status().message();
  };
  const ModelWeights part = part_of(m.weights, 2, 1);
  EXPECT_EQ(refusal({2, kMaxRows, kTopK, kLatent}, part), "(accepted)");
  EXPECT_THAT(refusal({2, kMaxRows, kTopK, kLatent + 32}, part),
              ::testing::HasSubstr("expected 96"));
  EXPECT_THAT(refusal({2, kMaxRows, 4, kLatent}, part), ::testing::HasSubstr("and 3"));
  EXPECT_THAT(refusal({2, kMaxRows, kTopK, kLatent}, part_of(m.weights, 2, 0)),
              ::testing::HasSubstr("experts from 0, expected from 3"));
}

TEST(EpMoe, PeerWaitsExactlyWhileAPeerIsAhead) {
  const Model m(90);
  Group group(m, 2, false);
  EXPECT_FALSE(group.moe(1).peer_waits());
  std::thread rank0([&] {
    EXPECT_TRUE(group.moe(0).run({0, 0, nullptr, nullptr, nullptr, nullptr}).ok());
  });
  while (!group.moe(1).peer_waits()) std::this_thread::yield();
  EXPECT_TRUE(group.moe(1).run({0, 0, nullptr, nullptr, nullptr, nullptr}).ok());
  rank0.join();
  EXPECT_FALSE(group.moe(0).peer_waits());
  EXPECT_FALSE(group.moe(1).peer_waits());
}

}  // namespace
}  // namespace k3::gate
