// The router: sigma = sigmoid(logits); the top_k of sigma + bias, ties to the lower index; weights
// sigma / (sum of the chosen sigma + 1e-20) * scaling. Neither the renormalisation nor the scaling
// can be seen in a model's logits when the norm after the combine undoes them, so they are held
// here.
#include <numeric>

#include "cpu/stage_gate.h"

namespace k3::gate {
namespace {

enum class Twin { kNone, kBiasedWeights, kNoRenorm, kNoScaling, kNoBias, kSoftmax, kRenormOfAll };

struct Choice {
  std::vector<int32_t> ids;
  Balls weights;
};

Choice choose(const std::vector<float>& logits, const std::vector<float>& bias, int64_t top_k,
              float scaling, Twin twin = Twin::kNone) {
  Balls sigma, rank;
  for (size_t e = 0; e < logits.size(); ++e) {
    sigma.push_back(sigmoid(exactly(logits[e])));
    if (twin == Twin::kSoftmax) sigma.back() = exp(exactly(logits[e]));
    rank.push_back(twin == Twin::kNoBias ? sigma[e] : sigma[e] + exactly(bias[e]));
  }
  std::vector<int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return rank[static_cast<size_t>(a)].v > rank[static_cast<size_t>(b)].v;
  });
  Choice c;
  c.ids.assign(order.begin(), order.begin() + top_k);
  Ball sum = exactly(0);
  const std::vector<int32_t>& summed = twin == Twin::kRenormOfAll ? order : c.ids;
  for (const int32_t e : summed) sum = sum + sigma[static_cast<size_t>(e)];
  for (const int32_t e : c.ids) {
    const auto i = static_cast<size_t>(e);
    Ball w = twin == Twin::kBiasedWeights ? rank[i] : sigma[i];
    if (twin != Twin::kNoRenorm) w = w / (sum + exactly(1e-20));
    if (twin != Twin::kNoScaling) w = w * exactly(scaling);
    c.weights.push_back(w);
  }
  return c;
}

// Whether float32 can order these: neighbours among the first top_k + 1 lie apart or are equal.
bool separated(const std::vector<float>& logits, const std::vector<float>& bias, int64_t top_k) {
  Balls rank;
  for (size_t e = 0; e < logits.size(); ++e) {
    rank.push_back(sigmoid(exactly(logits[e])) + exactly(bias[e]));
  }
  std::sort(rank.begin(), rank.end(), [](Ball a, Ball b) { return a.v > b.v; });
  const auto last = std::min(static_cast<size_t>(top_k) + 1, rank.size());
  for (size_t i = 1; i < last; ++i) {
    const double gap = rank[i - 1].v - rank[i].v;
    if (gap != 0 && gap <= rank[i - 1].r + rank[i].r) return false;
  }
  return true;
}

class Router : public IsaTest {
 protected:
  struct Got {
    std::vector<int32_t> ids;
    std::vector<float> weights;
  };
  Got run(const std::vector<float>& logits, const std::vector<float>& bias, int64_t top_k,
          float scaling) const {
    const auto n = static_cast<int64_t>(logits.size());
    Got got{std::vector<int32_t>(static_cast<size_t>(top_k), -7), poisoned(top_k)};
    std::vector<float> scratch = poisoned(2 * n);
    RouterArgs a;
    a.logits = logits.data();
    a.bias = bias.data();
    a.num_experts = n;
    a.top_k = top_k;
    a.scaling = scaling;
    a.ids = got.ids.data();
    a.weights = got.weights.data();
    a.scratch = scratch.data();
    k().router(a);
    return got;
  }
};

TEST_P(Router, ChoosesAndWeighsLikeTheEquations) {
  Random random(41);
  int held = 0;
  for (const int64_t experts : {2, 16, 37, 224, 896}) {
    for (const int64_t top_k : {1, 2, 8, 16}) {
      if (top_k > experts) continue;
      for (const float scaling : {1.f, 2.446f}) {
        for (int row = 0; row < 4; ++row) {
          const std::vector<float> logits = random.normals(experts, 2);
          const std::vector<float> bias = random.normals(experts, 0.2);
          if (!separated(logits, bias, top_k)) continue;
          ++held;
          const Choice want = choose(logits, bias, top_k, scaling);
          const Got got = run(logits, bias, top_k, scaling);
          EXPECT_EQ(got.ids, want.ids);
          EXPECT_WITHIN(got.weights, want.weights);
          double sum = 0;
          for (const float w : got.weights) sum += w;
          EXPECT_NEAR(sum, scaling, scaling * static_cast<double>(top_k + 3) * kUnit * 2);
        }
      }
    }
  }
  EXPECT_GT(held, 100);
}

TEST_P(Router, WrongTwinsTrip) {
  Random random(42);
  const std::vector<float> logits = random.normals(37, 2), bias = random.normals(37, 0.5);
  ASSERT_TRUE(separated(logits, bias, 8));
  const Choice want = choose(logits, bias, 8, 2.446f);
  EXPECT_EQ(run(logits, bias, 8, 2.446f).ids, want.ids);
  EXPECT_WITHIN(run(logits, bias, 8, 2.446f).weights, want.weights);
  for (const Twin twin :
       {Twin::kBiasedWeights, Twin::kNoRenorm, Twin::kNoScaling, Twin::kRenormOfAll}) {
    const Choice wrong = choose(logits, bias, 8, 2.446f, twin);
    EXPECT_EQ(wrong.ids, want.ids);
    EXPECT_TRIPS(wrong.weights, want.weights) << static_cast<int>(twin);
  }
  EXPECT_NE(choose(logits, bias, 8, 2.446f, Twin::kNoBias).ids, want.ids);
  EXPECT_TRIPS(choose(logits, bias, 8, 2.446f, Twin::kSoftmax).weights, want.weights);
}

TEST_P(Router, TheBiasSelectsAndDoesNotWeigh) {
  const std::vector<float> logits = {3, 2, 1, 0, -1, -2};
  std::vector<float> bias(6);
  bias[5] = 10;  // the weakest expert is forced in, first in order of choice
  const Got got = run(logits, bias, 2, 1);
  EXPECT_EQ(got.ids, (std::vector<int32_t>{5, 0}));
  const double weak = sigmoid_of(-2), strong = sigmoid_of(3);
  EXPECT_NEAR(got.weights[0], weak / (weak + strong), 1e-6);
  EXPECT_NEAR(got.weights[1], strong / (weak + strong), 1e-6);
}

TEST_P(Router, TiesGoToTheLowerIndex) {
  std::vector<float> logits(40, 0.5f), bias(40);
  EXPECT_EQ(run(logits, bias, 4, 1).ids, (std::vector<int32_t>{0, 1, 2, 3}));
  logits[30] = logits[11] = logits[21] = 2;  // in three different lanes and blocks of sixteen
  EXPECT_EQ(run(logits, bias, 4, 1).ids, (std::vector<int32_t>{11, 21, 30, 0}));
  EXPECT_EQ(run(logits, bias, 2, 1).ids, (std::vector<int32_t>{11, 21}));
  // Equal sums of different parts: the tie is of the choice, the weights are sigma's.
  logits.assign(4, 0);
  bias = {0.25f, 0, 0.25f, 0};
  const Got got = run(logits, bias, 3, 1);
  EXPECT_EQ(got.ids, (std::vector<int32_t>{0, 2, 1}));
  for (const float w : got.weights) EXPECT_NEAR(w, 1.0 / 3, 1e-7);
}

TEST_P(Router, VerySmallSigmasStillSumToTheScaling) {
  const std::vector<float> logits(20, -40.f), bias(20);  // sigma 4e-18, above the 1e-20 of the sum
  const Choice want = choose(logits, bias, 4, 1);
  EXPECT_WITHIN(run(logits, bias, 4, 1).weights, want.weights);
  // Far below it the 1e-20 rules and the weights vanish instead of dividing by zero.
  for (const float w : run(std::vector<float>(20, -80.f), bias, 4, 1).weights) {
    EXPECT_GE(w, 0);
    EXPECT_LT(w, 1e-12f);
  }
}

TEST_P(Router, IdsStayValidAndDistinctWhateverIsNaN) {
  Random random(43);
  for (const int nans : {1, 5, 20}) {
    for (int trial = 0; trial < 20; ++trial) {
      std::vector<float> logits = random.normals(20);
      const std::vector<float> bias(20);
      for (int i = 0; i < nans; ++i) {
        logits[nans == 20 ? static_cast<size_t>(i) : static_cast<size_t>(random.integer(0, 19))] =
            kNaN;
      }
      std::vector<int32_t> ids = run(logits, bias, 8, 1).ids;
      std::sort(ids.begin(), ids.end());
      EXPECT_GE(ids.front(), 0);
      EXPECT_LT(ids.back(), 20);
      EXPECT_EQ(std::adjacent_find(ids.begin(), ids.end()), ids.end());
      if (nans == 20) {
        EXPECT_TRUE(std::isnan(run(logits, bias, 8, 1).weights[0]));
      }
    }
  }
}

K3_EVERY_ISA(Router);

}  // namespace
}  // namespace k3::gate
