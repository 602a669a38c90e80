// bf16 conversion kernels, and the MXFP4 decode as a product sees it.
#include "cpu/stage_gate.h"

namespace k3::gate {
namespace {

class Formats : public IsaTest {
 protected:
  std::vector<std::byte> narrow(const std::vector<float>& x) const {
    std::vector<std::byte> out(2 * x.size(), std::byte{0xff});
    k().f32_to_bf16(x.data(), out.data(), static_cast<int64_t>(x.size()));
    return out;
  }
  // One weight row through the product with unit vectors: the decoded weights.
  std::vector<float> decode(const std::vector<std::byte>& packed,
                            const std::vector<std::byte>& scale, int64_t rows) const {
    const auto n = static_cast<int64_t>(packed.size() * 2);
    std::vector<float> x(static_cast<size_t>(n * n)), y = poisoned(n), out;
    for (int64_t i = 0; i < n; ++i) x[static_cast<size_t>(i * n + i)] = 1;
    std::vector<float> scratch = poisoned(kMxfp4Tile * n);
    for (int64_t first = 0; first < n; first += rows) {
      GemmArgs a;
      a.x = x.data() + first * n;
      a.ldx = n;
      a.rows = std::min(rows, n - first);
      a.k = n;
      a.w = packed.data();
      a.w_stride = n / 2;
      a.scale = scale.data();
      a.n_end = 1;
      a.y = y.data() + first;
      a.ldy = 1;
      a.scratch = scratch.data();
      k().gemm_mxfp4(a);
    }
    return y;
  }
};

TEST_P(Formats, EveryBf16PatternComesBack) {
  std::vector<std::byte> all(2 * 65536);
  for (uint32_t h = 0; h < 65536; ++h) {
    const auto half = static_cast<uint16_t>(h);
    std::memcpy(&all[2 * h], &half, 2);
  }
  std::vector<float> wide = poisoned(65536);
  k().bf16_to_f32(all.data(), wide.data(), 65536);
  const std::vector<std::byte> back = narrow(wide);
  for (uint32_t h = 0; h < 65536; ++h) {
    ASSERT_EQ(f32_bits(wide[h]), h << 16);
    uint16_t half;
    std::memcpy(&half, &back[2 * h], 2);
    if ((h & 0x7fff) > 0x7f80) {
      ASSERT_EQ(half, h | 0x40);  // a NaN stays one, quiet
    } else {
      ASSERT_EQ(half, h);
    }
  }
}

TEST_P(Formats, NarrowingRoundsToNearestEvenAndOverflowsToInfinity) {
  const auto one = [&](uint32_t bits) {
    uint16_t h;
    const std::vector<std::byte> b = narrow({f32_from_bits(bits)});
    std::memcpy(&h, b.data(), 2);
    return h;
  };
  EXPECT_EQ(one(0x3f808000), 0x3f80);  // tie, even below
  EXPECT_EQ(one(0x3f818000), 0x3f82);  // tie, even above: truncation would give 3f81
  EXPECT_EQ(one(0x3f808001), 0x3f81);
  EXPECT_EQ(one(0x3f807fff), 0x3f80);
  EXPECT_EQ(one(0xbf818000), 0xbf82);
  EXPECT_EQ(one(0x7f7fffff), 0x7f80);
  EXPECT_EQ(one(0xff7fffff), 0xff80);
  EXPECT_EQ(one(0x7f7f7fff), 0x7f7f);
  EXPECT_EQ(one(0x7f800000), 0x7f80);
  EXPECT_EQ(one(0x00008000), 0x0000);
  EXPECT_EQ(one(0x00018000), 0x0002);
  EXPECT_EQ(one(0x80000000), 0x8000);
  EXPECT_EQ(one(0x7f800001), 0x7fc0);  // the payload lies in the low half only
  EXPECT_EQ(one(0x7fffffff), 0x7fff);
}

// The landing inside kernels is another instruction sequence: the same rounding, on every tail.
TEST_P(Formats, ALandingIsTheSameRounding) {
  Random random(3);
  for (int64_t n = 1; n <= 35; ++n) {
    std::vector<float> x(static_cast<size_t>(n)), zero(x.size()), y = poisoned(n);
    for (float& v : x) v = f32_from_bits(static_cast<uint32_t>(random.integer(0, 0x7f7f0000)));
    if (n > 1) x[0] = f32_from_bits(0x3f818000);
    k().add(x.data(), zero.data(), y.data(), n, true);
    for (size_t i = 0; i < x.size(); ++i) EXPECT_EQ(y[i], nearest_bf16(x[i]));
  }
}

// Bytes, codes and values of the release's layer 1, expert 0, w1, row 0.
TEST_P(Formats, Mxfp4DecodesTheKnownBytes) {
  std::vector<std::byte> packed(16), scale = {std::byte{121}};
  const int known[] = {22, 185, 206, 35};
  for (size_t i = 0; i < 4; ++i) packed[i] = static_cast<std::byte>(known[i]);
  const std::vector<float> want = {0.0625f,  0.0078125f, -0.0078125f, -0.0234375f,
                                   -0.0625f, -0.03125f,  0.0234375f,  0.015625f};
  for (const int64_t rows : {1, 2, 7}) {  // the register path and the scratch path
    std::vector<float> got = decode(packed, scale, rows);
    got.resize(8);
    EXPECT_EQ(got, want);
  }
  // High nibble first is the mistake to make; it does not decode to the same.
  for (std::byte& b : packed) b = b << 4 | b >> 4;
  std::vector<float> swapped = decode(packed, scale, 1);
  swapped.resize(8);
  EXPECT_NE(swapped, want);
}

TEST_P(Formats, EveryCodeUnderEveryScaleIsExact) {
  const double magnitude[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  std::vector<std::byte> packed(16);
  for (size_t i = 0; i < 16; ++i) packed[i] = static_cast<std::byte>(i | (15 - i) << 4);
  for (int s = 0; s < 256; ++s) {
    for (const int64_t rows : {2, 3}) {
      const std::vector<float> got = decode(packed, {static_cast<std::byte>(s)}, rows);
      for (size_t i = 0; i < 32; ++i) {
        const size_t code = i % 2 == 0 ? i / 2 : 15 - i / 2;
        if (s == 255) {
          ASSERT_TRUE(std::isnan(got[i]));
          continue;
        }
        const double want = (code >= 8 ? -1 : 1) * std::ldexp(magnitude[code % 8], s - 127);
        // From 253 on the largest codes are beyond float32, so infinity, and infinity times the
        // zeros of the unit vector is NaN.
        if (s >= 253 && !std::isfinite(got[i])) continue;
        ASSERT_EQ(got[i], want) << "scale " << s << " code " << code;
      }
    }
  }
}

K3_EVERY_ISA(Formats);

TEST(SelectKernels, NamesWhatItDoesNotKnow) {
  const Result<const Kernels*> none = select_kernels("sse9");
  ASSERT_FALSE(none.ok());
  EXPECT_EQ(none.status().code(), ErrorCode::kInvalidArgument);
  EXPECT_NE(none.status().message().find("sse9"), std::string::npos);
}
TEST(SelectKernels, AutoIsOneThatRuns) {
  const Result<const Kernels*> best = select_kernels("auto");
  ASSERT_TRUE(best.ok());
  const Result<const Kernels*> again = select_kernels((*best)->name);
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(*best, *again);
  EXPECT_STREQ((*select_kernels("portable"))->name, "portable");
}

}  // namespace
}  // namespace k3::gate
