// exp, sigmoid and tanh against float64, in ulp, over their whole range.
#include <cmath>

#include "cpu/stage_gate.h"

namespace k3::gate {
namespace {

using Map = void (*)(const float*, float*, int64_t);
using Truth = double (*)(double);

double ulp(double x) {
  int e;
  std::frexp(x, &e);
  return std::ldexp(1.0, std::max(e - 24, -149));
}

double exp_of(double x) { return std::exp(x); }
double tanh_of(double x) { return std::tanh(x); }

// Every `step`-th float32 whose value lies in [lo, hi], of both signs.
std::vector<float> sweep(float lo, float hi, uint32_t step = 6007) {
  std::vector<float> x;
  for (uint64_t bits = 0; bits <= 0xffffffffu; bits += step) {
    const float f = f32_from_bits(static_cast<uint32_t>(bits));
    if (f >= lo && f <= hi) x.push_back(f);
  }
  x.push_back(lo);
  x.push_back(hi);
  return x;
}

double worst_ulps(Map f, Truth truth, const std::vector<float>& x) {
  std::vector<float> y = poisoned(static_cast<int64_t>(x.size()));
  f(x.data(), y.data(), static_cast<int64_t>(x.size()));
  double worst = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double want = truth(x[i]);
    const double off = std::abs(y[i] - want) / ulp(want);
    worst = std::isnan(off) ? kInf : std::max(worst, off);
  }
  return worst;
}

class Elementary : public IsaTest {};

// exp is taken on [-87, 88], where result and reciprocal are normal; see ExpSaturates for outside.
TEST_P(Elementary, ExpIsWithinItsUlps) {
  const double worst = worst_ulps(k().exp, exp_of, sweep(-87, 88));
  RecordProperty("worst_ulps", cat(worst));
  EXPECT_LE(worst, kExpUlps);
  EXPECT_GT(worst, 0.3) << "no float32 exp is this good: the sweep does not measure";
}
TEST_P(Elementary, SigmoidIsWithinItsUlps) {
  const double worst = worst_ulps(k().sigmoid, sigmoid_of, sweep(-87, kInf));
  RecordProperty("worst_ulps", cat(worst));
  EXPECT_LE(worst, kSigmoidUlps);
}
TEST_P(Elementary, TanhIsWithinItsUlps) {
  const double worst = worst_ulps(k().tanh, tanh_of, sweep(-kInf, kInf));
  RecordProperty("worst_ulps", cat(worst));
  EXPECT_LE(worst, kTanhUlps);
}

// The sweep must see a function that is off by three ulp, and a tanh formed from exp, which loses
// small arguments.
TEST_P(Elementary, WrongTwinsTripTheBound) {
  const auto coarse = [](double x) { return std::exp(x) * (1 + 3 * 0x1p-23); };
  EXPECT_GT(worst_ulps(k().exp, coarse, sweep(-87, 88)), kExpUlps);
  const auto cancelling = [](double x) {
    const float e = static_cast<float>(std::exp(2 * x));
    return static_cast<double>((e - 1) / (e + 1));
  };
  EXPECT_GT(worst_ulps(k().tanh, cancelling, sweep(-1, 1)), kTanhUlps);
}

TEST_P(Elementary, ExpSaturatesBelow2eMinus38AndAbove1e38) {
  const std::vector<float> x = {-87.5f, -1000.f, -3e38f, -kInf, 88.5f, 1000.f, kInf};
  std::vector<float> y = poisoned(7);
  k().exp(x.data(), y.data(), 7);
  for (int i = 0; i < 4; ++i) {
    EXPECT_GE(y[i], 0) << x[i];
    EXPECT_LE(y[i], 2e-38f) << x[i];
  }
  for (int i = 4; i < 7; ++i) {
    EXPECT_GE(y[i], 1e38f) << x[i];
  }
}

TEST_P(Elementary, InfinitiesReachTheLimits) {
  const std::vector<float> x = {kInf, -kInf, 3e38f, -3e38f};
  std::vector<float> s = poisoned(4), t = poisoned(4);
  k().sigmoid(x.data(), s.data(), 4);
  k().tanh(x.data(), t.data(), 4);
  EXPECT_EQ(s[0], 1);
  EXPECT_EQ(s[2], 1);
  EXPECT_LE(s[1], 2e-38f);
  EXPECT_LE(s[3], 2e-38f);
  EXPECT_EQ(t, (std::vector<float>{1, -1, 1, -1}));
}

TEST_P(Elementary, NaNComesOutOfItsLaneAndNoOther) {
  for (int64_t n = 1; n <= 40; ++n) {
    for (Map f : {k().exp, k().sigmoid, k().tanh}) {
      std::vector<float> x(static_cast<size_t>(n), 0.25f), y = poisoned(n);
      const auto at = static_cast<size_t>(n / 2);
      x[at] = kNaN;
      f(x.data(), y.data(), n);
      for (size_t i = 0; i < x.size(); ++i) EXPECT_EQ(std::isnan(y[i]), i == at) << n << " " << i;
    }
  }
}

TEST_P(Elementary, ZerosAndSubnormalsKeepTheirValue) {
  const std::vector<float> x = {0.f, 1e-45f, -1e-45f, 1e-40f, -1e-38f};
  std::vector<float> e = poisoned(5), s = poisoned(5), t = poisoned(5);
  k().exp(x.data(), e.data(), 5);
  k().sigmoid(x.data(), s.data(), 5);
  k().tanh(x.data(), t.data(), 5);
  for (size_t i = 0; i < x.size(); ++i) {
    EXPECT_EQ(e[i], 1);
    EXPECT_EQ(s[i], 0.5f);
    EXPECT_EQ(t[i], x[i]);
  }
}

K3_EVERY_ISA(Elementary);

}  // namespace
}  // namespace k3::gate
