// The routed experts as one call against their equations: y = W2 situ(W1 z, W3 z) per slot,
// combined in slot order. Small random MXFP4 experts with scales of every size.
#include "cpu/local_moe.h"

#include <map>

#include "cpu/moe_fixture.h"

namespace k3::gate {
namespace {

enum class Twin { kNone, kGateAndUpSwapped, kWeightBeforeDown, kSlotsShifted, kRowsShifted };

Balls reference(const Model& m, const Call& c, bool bf16, Twin twin = Twin::kNone) {
  const Ball beta = exactly(4), linear = exactly(25);
  Balls out;
  for (int64_t r = 0; r < c.rows; ++r) {
    Balls acc(kLatent);
    const int64_t from = twin == Twin::kRowsShifted ? (r + 1) % c.rows : r;
    const Balls z = exactly({c.z.begin() + from * kLatent, c.z.begin() + (from + 1) * kLatent});
    for (int64_t s = 0; s < kTopK; ++s) {
      const auto slot = static_cast<size_t>(r * kTopK + s);
      const auto& e = m.experts[static_cast<size_t>(c.ids[slot])];
      const auto shifted = static_cast<size_t>(r * kTopK + (s + 1) % kTopK);
      const Ball weight = exactly(c.weights[twin == Twin::kSlotsShifted ? shifted : slot]);
      const Balls w1 = exactly(e[0].value), w3 = exactly(e[1].value), w2 = exactly(e[2].value);
      Balls hidden;
      for (int64_t n = 0; n < kInter; ++n) {
        Ball g = land(dot(z.data(), w1.data() + n * kLatent, kLatent), bf16);
        Ball u = land(dot(z.data(), w3.data() + n * kLatent, kLatent), bf16);
        if (twin == Twin::kGateAndUpSwapped) std::swap(g, u);
        Ball h = beta * tanh(g / beta) * sigmoid(g) * (linear * tanh(u / linear));
        if (twin == Twin::kWeightBeforeDown) h = h * weight;
        hidden.push_back(land(h, bf16));
      }
      for (int64_t n = 0; n < kLatent; ++n) {
        const Ball y = land(dot(hidden.data(), w2.data() + n * kInter, kInter), bf16);
        const auto i = static_cast<size_t>(n);
        acc[i] = twin == Twin::kWeightBeforeDown ? acc[i] + y : fused(weight, y, acc[i]);
      }
    }
    for (const Ball& a : acc) out.push_back(land(a, bf16));
  }
  return out;
}

class LocalMoeGate : public IsaTest {
 protected:
  void make(bool bf16, int threads = 2, int64_t max_rows = 80) {
    moe_.reset();
    pool_ = std::make_unique<ThreadPool>(threads);
    NumericsPolicy policy;
    policy.numerics = bf16 ? Numerics::kBf16 : Numerics::kF32;
    auto made = LocalMoe::create(&model_.weights, pool_.get(), &k(), policy, max_rows);
    ASSERT_TRUE(made.ok()) << made.status().message();
    moe_ = std::move(made).value();
  }
  std::vector<float> run(const Call& c) {
    std::vector<float> out = poisoned(c.rows * kLatent);
    const Status s = moe_->run({0, c.rows, c.z.data(), c.ids.data(), c.weights.data(), out.data()});
    EXPECT_TRUE(s.ok()) << s.message();
    return out;
  }
  Model model_{90};
  std::unique_ptr<ThreadPool> pool_;
  std::unique_ptr<LocalMoe> moe_;
};

TEST_P(LocalMoeGate, IsTheEquationsForEveryRowCount) {
  Random random(91);
  for (const bool bf16 : {false, true}) {
    make(bf16);
    for (const int64_t rows : {1, 2, 3, 17, 70}) {
      const Call c = make_call(random, rows, {0, 1, 2, 3, 4, 5}, bf16);
      EXPECT_WITHIN(run(c), reference(model_, c, bf16)) << rows << " " << bf16;
    }
  }
}

TEST_P(LocalMoeGate, AllRowsOnTheSameExpertsAndExpertsWithoutRows) {
  Random random(92);
  for (const bool bf16 : {false, true}) {
    make(bf16);
    // 70 rows an expert: more than one chunk of its rows; the other experts have none.
    for (const std::vector<int32_t>& experts : {std::vector<int32_t>{1, 2, 5}, {0, 3, 4}}) {
      const Call c = make_call(random, 70, experts, bf16);
      EXPECT_WITHIN(run(c), reference(model_, c, bf16));
    }
    const Call c = make_call(random, 3, {0, 1, 2, 3}, bf16);
    EXPECT_WITHIN(run(c), reference(model_, c, bf16))
        << "after a bigger call, nothing of it remains";
  }
}

TEST_P(LocalMoeGate, WrongTwinsTrip) {
  Random random(93);
  for (const bool bf16 : {false, true}) {
    make(bf16);
    const Call c = make_call(random, 5, {0, 1, 2, 3}, bf16);
    const Balls want = reference(model_, c, bf16);
    EXPECT_WITHIN(run(c), want);
    for (const Twin twin : {Twin::kGateAndUpSwapped, Twin::kSlotsShifted, Twin::kRowsShifted}) {
      EXPECT_TRIPS(reference(model_, c, bf16, twin), want) << static_cast<int>(twin);
    }
    if (bf16) {  // without landings the weight commutes with the down projection
      EXPECT_TRIPS(reference(model_, c, bf16, Twin::kWeightBeforeDown), want);
    }
    Model swapped(90);
    Random again(90);
    for (auto& e : swapped.experts) {
      for (size_t i = 0; i < 3; ++i) {
        e[i] = random_matrix(again, i == 2 ? kLatent : kInter, i == 2 ? kInter : kLatent, 118, 125,
                             true);
      }
    }
    EXPECT_TRIPS(reference(swapped, c, bf16), want);
  }
}

TEST_P(LocalMoeGate, NoRowsIsANormalCall) {
  make(false);
  EXPECT_TRUE(moe_->run({0, 0, nullptr, nullptr, nullptr, nullptr}).ok());
}

TEST_P(LocalMoeGate, ARowsBitsDependOnNoOtherRowAndNoThread) {
  Random random(94);
  for (const bool bf16 : {false, true}) {
    make(bf16);
    const Call c = make_call(random, 70, {0, 1, 2, 3, 4, 5}, bf16);
    const std::vector<float> together = run(c);
    const auto rows = [&](int64_t first, int64_t count) {
      Call part;
      part.rows = count;
      part.z = {c.z.begin() + first * kLatent, c.z.begin() + (first + count) * kLatent};
      part.ids = {c.ids.begin() + first * kTopK, c.ids.begin() + (first + count) * kTopK};
      part.weights = {c.weights.begin() + first * kTopK,
                      c.weights.begin() + (first + count) * kTopK};
      return part;
    };
    const auto want = [&](int64_t first, int64_t count) {
      return std::vector<float>(together.begin() + first * kLatent,
                                together.begin() + (first + count) * kLatent);
    };
    for (int64_t r = 0; r < 70; ++r) EXPECT_SAME_BITS(run(rows(r, 1)), want(r, 1)) << r;
    for (const int64_t count : {2, 3, 17, 33})
      EXPECT_SAME_BITS(run(rows(5, count)), want(5, count));
    EXPECT_OTHER_BITS(run(rows(1, 1)), want(2, 1));
    for (const int threads : {1, 3}) {
      make(bf16, threads);
      EXPECT_SAME_BITS(run(c), together);
    }
  }
}

// One-hot weights give each slot's y exactly; fused adds in ascending slots must then give the
// bits.
TEST_P(LocalMoeGate, CombinesInSlotOrderBitForBit) {
  Random random(95);
  for (const bool bf16 : {false, true}) {
    make(bf16);
    const Call c = make_call(random, 9, {0, 1, 2, 3}, bf16);
    std::vector<std::vector<float>> y;
    for (size_t s = 0; s < kTopK; ++s) {
      Call one = c;
      for (size_t i = 0; i < one.weights.size(); ++i) one.weights[i] = i % kTopK == s ? 1.f : 0.f;
      y.push_back(run(one));
    }
    std::vector<float> up, down;
    for (size_t i = 0; i < y[0].size(); ++i) {
      const size_t row = i / kLatent;
      float a = 0, b = 0;
      for (size_t s = 0; s < kTopK; ++s) {
        const size_t t = kTopK - 1 - s;
        a = std::fma(c.weights[row * kTopK + s], y[s][i], a);
        b = std::fma(c.weights[row * kTopK + t], y[t][i], b);
      }
      up.push_back(bf16 ? static_cast<float>(nearest_bf16(a)) : a);
      down.push_back(b);
    }
    EXPECT_SAME_BITS(run(c), up);
    EXPECT_OTHER_BITS(down, up);
  }
}

K3_EVERY_ISA(LocalMoeGate);

TEST(ExpertRoutes, SortsByExpertAndKeepsRowsAscending) {
  ExpertRoutes routes;
  routes.reserve(12, 4);
  // Experts 2..5 are local; 0, 1 and 7 are another rank's.
  const std::vector<int32_t> ids = {5, 0, 2, 7, 2, 5, 3, 2, 1};
  routes.build(ids.data(), 3, 3, 2, 4);
  ASSERT_EQ(routes.groups().size(), 3u);
  std::map<int64_t, std::vector<int32_t>> got;
  for (const ExpertRoutes::Group& g : routes.groups()) {
    for (int64_t i = g.begin; i < g.end; ++i) {
      const auto at = static_cast<size_t>(i);
      got[g.expert].push_back(routes.assignments()[at]);
      EXPECT_EQ(routes.rows()[at], routes.assignments()[at] / 3);
    }
  }
  EXPECT_EQ(got, (std::map<int64_t, std::vector<int32_t>>{{0, {2, 4, 7}}, {1, {6}}, {3, {0, 5}}}));
  routes.build(ids.data(), 0, 3, 2, 4);
  EXPECT_TRUE(routes.groups().empty());
}

}  // namespace
}  // namespace k3::gate
