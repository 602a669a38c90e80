// The scalar conversions of the checkpoint's number formats, over all their patterns.
#include "core/dtype.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

namespace k3 {
namespace {

TEST(Bf16, EveryPatternComesBack) {
  for (uint32_t h = 0; h < 65536; ++h) {
    const float f = bf16_to_f32(static_cast<uint16_t>(h));
    ASSERT_EQ(f32_bits(f), h << 16);
    const bool nan = (h & 0x7fff) > 0x7f80;
    ASSERT_EQ(std::isnan(f), nan);
    ASSERT_EQ(f32_to_bf16(f), nan ? h | 0x40 : h);
  }
}

// Nearest by distance to both neighbours, even at a tie; truncation fails the same test.
int misrounded(uint16_t (*convert)(float)) {
  std::mt19937 random(1);
  int wrong = 0;
  for (int i = 0; i < 200000; ++i) {
    uint32_t bits = random() & 0x7effffffu;  // the upper neighbour is finite too
    if (i % 4 == 0) bits = (bits & 0xffff0000u) | 0x8000u;
    const double x = f32_from_bits(bits);
    const uint32_t low = bits >> 16, high = low + 1;
    const double below = x - bf16_to_f32(static_cast<uint16_t>(low));
    const double above = bf16_to_f32(static_cast<uint16_t>(high)) - x;
    const uint32_t want = below < above ? low : above < below ? high : low % 2 == 0 ? low : high;
    wrong += convert(static_cast<float>(x)) != want;
    wrong += convert(static_cast<float>(-x)) != (want | 0x8000u);
  }
  return wrong;
}
TEST(Bf16, RoundsToNearestAndTiesToEven) {
  EXPECT_EQ(misrounded(f32_to_bf16), 0);
  EXPECT_GT(misrounded([](float f) { return static_cast<uint16_t>(f32_bits(f) >> 16); }), 1000);
  EXPECT_GT(
      misrounded([](float f) { return static_cast<uint16_t>((f32_bits(f) + 0x8000u) >> 16); }),
      1000);
}

TEST(Bf16, OverflowsToInfinityAndKeepsNaN) {
  EXPECT_EQ(f32_to_bf16(3.4028235e38f), 0x7f80);
  EXPECT_EQ(f32_to_bf16(-3.4028235e38f), 0xff80);
  EXPECT_EQ(f32_to_bf16(f32_from_bits(0x7f7f7fff)), 0x7f7f);
  EXPECT_EQ(f32_to_bf16(INFINITY), 0x7f80);
  EXPECT_EQ(f32_to_bf16(f32_from_bits(0x7f800001)), 0x7fc0);
  EXPECT_EQ(f32_to_bf16(f32_from_bits(0xffffffff)), 0xffff);
  EXPECT_EQ(f32_to_bf16(-0.f), 0x8000);
}

TEST(E2m1, IsItsBits) {
  for (int code = 0; code < 16; ++code) {
    const int exponent = code >> 1 & 3, mantissa = code & 1;
    const double magnitude =
        exponent == 0 ? 0.5 * mantissa : std::ldexp(1 + 0.5 * mantissa, exponent - 1);
    EXPECT_EQ(kE2m1[code], code & 8 ? -magnitude : magnitude);
    EXPECT_EQ(std::signbit(kE2m1[code]), (code & 8) != 0);
  }
}

TEST(E8m0, IsAPowerOfTwoAndNaNAt255) {
  for (int s = 0; s < 255; ++s) {
    ASSERT_EQ(e8m0_to_f32(static_cast<uint8_t>(s)), std::ldexp(1.0, s - 127)) << s;
  }
  EXPECT_TRUE(std::isnan(e8m0_to_f32(255)));
}

// Bytes, codes and values of the release's layer 1, expert 0, w1, row 0 under scale byte 121.
TEST(Mxfp4, TheKnownBytesAreTheKnownValues) {
  const uint8_t bytes[] = {22, 185, 206, 35};
  const double want[] = {0.0625,  0.0078125, -0.0078125, -0.0234375,
                         -0.0625, -0.03125,  0.0234375,  0.015625};
  for (int i = 0; i < 8; ++i) {
    const int code = i % 2 == 0 ? bytes[i / 2] & 15 : bytes[i / 2] >> 4;
    EXPECT_EQ(kE2m1[code] * e8m0_to_f32(121), want[i]);
  }
}

TEST(DType, BytesAndNames) {
  EXPECT_EQ(dtype_bytes(DType::kBF16), 2u);
  EXPECT_EQ(dtype_bytes(DType::kF32), 4u);
  EXPECT_EQ(dtype_bytes(DType::kU8), 1u);
  EXPECT_STREQ(dtype_name(DType::kBF16), "BF16");
  EXPECT_STREQ(dtype_name(DType::kF32), "F32");
  EXPECT_STREQ(dtype_name(DType::kU8), "U8");
}

}  // namespace
}  // namespace k3
