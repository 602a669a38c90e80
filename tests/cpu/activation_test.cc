// situ, the output gate, the residual add and the experts' combine.
#include "cpu/stage_gate.h"

namespace k3::gate {
namespace {

constexpr int64_t kWidths[] = {1, 15, 16, 17, 40, 99};

enum class Twin { kNone, kSigmoidOfScaled, kSwapped, kNoLinear, kClamp, kSilu };

Balls situ(const std::vector<float>& gate, const std::vector<float>& up, bool bf16,
           Twin twin = Twin::kNone) {
  const Ball beta = exactly(4), linear = exactly(25);
  Balls out;
  for (size_t i = 0; i < gate.size(); ++i) {
    Ball g = exactly(gate[i]), u = exactly(up[i]);
    if (twin == Twin::kSwapped) std::swap(g, u);
    Ball a = beta * tanh(g / beta) * sigmoid(twin == Twin::kSigmoidOfScaled ? g / beta : g);
    if (twin == Twin::kSilu) a = g * sigmoid(g);
    Ball b = linear * tanh(u / linear);
    if (twin == Twin::kNoLinear) b = u;
    if (twin == Twin::kClamp) b = {std::clamp(u.v, -25.0, 25.0), 0};
    out.push_back(land(a * b, bf16));
  }
  return out;
}

class Activation : public IsaTest {};

TEST_P(Activation, SituIsTheEquationAndItsTwinsTrip) {
  Random random(31);
  for (const bool bf16 : {false, true}) {
    for (const int64_t n : kWidths) {
      std::vector<float> g = random.normals(n, 5, bf16), u = random.normals(n, 20, bf16);
      std::vector<float> y = poisoned(n);
      k().situ(g.data(), u.data(), y.data(), n, 4, 25, bf16);
      const Balls want = situ(g, u, bf16);
      EXPECT_WITHIN(y, want) << n;
      k().situ(g.data(), u.data(), g.data(), n, 4, 25, bf16);  // in place, as the dense MLP does
      EXPECT_SAME_BITS(g, y);
    }
    const std::vector<float> g = random.normals(40, 5, bf16), u = random.normals(40, 20, bf16);
    for (const Twin twin :
         {Twin::kSigmoidOfScaled, Twin::kSwapped, Twin::kNoLinear, Twin::kClamp, Twin::kSilu}) {
      EXPECT_TRIPS(situ(g, u, bf16, twin), situ(g, u, bf16)) << static_cast<int>(twin);
    }
  }
}

TEST_P(Activation, SituSaturatesAtAHundredAndPassesNaN) {
  const std::vector<float> g = {1e30f, 1e30f, -1e30f, kInf, kNaN, 1},
                           u = {1e30f, -1e30f, 1e30f, kInf, 1, kNaN};
  std::vector<float> y = poisoned(6);
  k().situ(g.data(), u.data(), y.data(), 6, 4, 25, true);
  EXPECT_EQ(y[0], 100);
  EXPECT_EQ(y[1], -100);
  EXPECT_LE(std::abs(y[2]), 1e-35f);
  EXPECT_EQ(y[3], 100);
  EXPECT_TRUE(std::isnan(y[4]) && std::isnan(y[5]));
}

TEST_P(Activation, TheOutputGateLandsTwice) {
  Random random(32);
  for (const bool bf16 : {false, true}) {
    for (const int64_t n : kWidths) {
      const std::vector<float> x = random.normals(n, 1, bf16), gate = random.normals(n, 3, bf16);
      std::vector<float> y = x;
      k().sigmoid_gate(y.data(), gate.data(), n, bf16);
      Balls want, once, raw;
      for (size_t i = 0; i < x.size(); ++i) {
        const Ball s = sigmoid(exactly(gate[i]));
        want.push_back(land(exactly(x[i]) * land(s, bf16), bf16));
        once.push_back(land(exactly(x[i]) * s, bf16));
        raw.push_back(land(exactly(x[i]) * exactly(gate[i]), bf16));
      }
      EXPECT_WITHIN(y, want);
      EXPECT_TRIPS(raw, want);
      if (bf16 && n >= 40) {
        EXPECT_TRIPS(once, want);
      }
    }
  }
}

TEST_P(Activation, AddRoundsOnceAndMayBeInPlace) {
  Random random(33);
  for (const bool bf16 : {false, true}) {
    for (const int64_t n : kWidths) {
      std::vector<float> a = random.normals(n, 1, bf16), y = poisoned(n);
      const std::vector<float> b = random.normals(n, 0.01, bf16);
      k().add(a.data(), b.data(), y.data(), n, bf16);
      for (size_t i = 0; i < a.size(); ++i) {
        const float sum = a[i] + b[i];
        EXPECT_EQ(y[i], bf16 ? nearest_bf16(sum) : sum);
      }
      k().add(a.data(), b.data(), a.data(), n, bf16);
      EXPECT_SAME_BITS(a, y);
    }
  }
}

// The order is the contract, so the expected bits can be written down: fused adds, slots ascending.
TEST_P(Activation, CombineAddsSlotsInAscendingOrder) {
  Random random(34);
  for (const bool bf16 : {false, true}) {
    for (const int64_t n : kWidths) {
      for (const int64_t slots : {1, 2, 16}) {
        const int64_t stride = n + 3;
        const std::vector<float> rows = random.normals(slots * stride), w = random.normals(slots);
        std::vector<float> y = poisoned(n), want, reversed;
        k().combine(rows.data(), stride, w.data(), slots, y.data(), n, bf16);
        for (int64_t i = 0; i < n; ++i) {
          float up = 0, down = 0;
          for (int64_t s = 0; s < slots; ++s) {
            const int64_t t = slots - 1 - s;
            up = std::fma(w[static_cast<size_t>(s)], rows[static_cast<size_t>(s * stride + i)], up);
            down = std::fma(w[static_cast<size_t>(t)], rows[static_cast<size_t>(t * stride + i)],
                            down);
          }
          want.push_back(bf16 ? static_cast<float>(nearest_bf16(up)) : up);
          reversed.push_back(bf16 ? static_cast<float>(nearest_bf16(down)) : down);
        }
        EXPECT_SAME_BITS(y, want);
        if (!bf16 && slots == 16 && n >= 16) {
          EXPECT_OTHER_BITS(reversed, want);
        }
      }
    }
  }
}

K3_EVERY_ISA(Activation);

}  // namespace
}  // namespace k3::gate
