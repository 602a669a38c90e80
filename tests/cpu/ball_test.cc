// The gates' own gate: a bound must hold for float32 and must not be slack.
#include "cpu/ball.h"

#include "cpu/stage_gate.h"

namespace k3::gate {
namespace {

TEST(Ball, BoundsWhatFloat32Gives) {
  Random random(1);
  for (int i = 0; i < 20000; ++i) {
    const float a = random.normal(3), b = random.normal(3), c = random.normal(3);
    const float got = (a * b + c) / std::sqrt(a * a + 0.5f) - b;
    const Ball x = exactly(a), y = exactly(b), z = exactly(c);
    const Ball want = (x * y + z) / sqrt(x * x + exactly(0.5)) - y;
    ASSERT_LE(std::abs(got - want.v), want.r);
  }
}

TEST(Ball, IsAFewRoundingsWide) {
  Random random(2);
  for (int i = 0; i < 1000; ++i) {
    const Ball x = exactly(random.uniform(1, 2)), y = exactly(random.uniform(1, 2));
    const Ball want = (x * y + x) / sqrt(y);
    ASSERT_LE(want.r, 4.1 * 0x1p-24 * want.v);
  }
  const std::vector<float> ones(4096, 1.f);
  const Balls b = exactly(ones);
  EXPECT_LE(dot(b.data(), b.data(), 4096).r, 261 * 0x1p-24 * 4096);
}

TEST(Ball, LandingIsExactAwayFromTiesAndCoversBothSidesAtOne) {
  EXPECT_EQ(land({1.001, 1e-7}, true).v, 1.0);
  EXPECT_EQ(land({1.001, 1e-7}, true).r, 0.0);
  const Ball tie = land({1 + 0x1p-8, 1e-7}, true);
  EXPECT_EQ(tie.v - tie.r, 1.0);
  EXPECT_EQ(tie.v + tie.r, 1 + 0x1p-7);
}

TEST(Ball, NearestBf16AgreesWithTheConversionOnEveryHighHalf) {
  for (uint32_t high = 0; high < 0x7f80; ++high) {
    for (const uint32_t low : {0x0000u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      const float f = f32_from_bits(high << 16 | low);
      if (std::isinf(round_to_bf16(f))) continue;
      ASSERT_EQ(nearest_bf16(f), static_cast<double>(round_to_bf16(f))) << f;
    }
  }
}

TEST(StageGate, AGateCallsOutNaNWrongSizeAndAMissOfTwoRadii) {
  const Balls want = {{1, 1e-6}, {2, 0}};
  EXPECT_WITHIN((std::vector<float>{1, 2}), want);
  EXPECT_TRIPS((std::vector<float>{1, kNaN}), want);
  EXPECT_TRIPS((std::vector<float>{1}), want);
  EXPECT_TRIPS((std::vector<float>{1.000002f, 2}), want);
  EXPECT_OTHER_BITS(std::vector<float>{0.f}, std::vector<float>{-0.f});
}

}  // namespace
}  // namespace k3::gate
