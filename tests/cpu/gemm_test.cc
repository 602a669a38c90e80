// The matrix products. y[r, n] = sum_k x[r, k] w[n, k]; the bound is that of the promised order
// (ball.h): |err| <= (ceil(k / 16) + 4) u sum |x w|, and half a bf16 step where the result lands.
#include "cpu/stage_gate.h"

namespace k3::gate {
namespace {

enum class Kind { kBf16, kF32, kMxfp4 };

struct Product {
  Kind kind;
  int64_t rows, n, k;
  std::vector<float> x, w;  // w: what the bytes mean, [n, k]
  std::vector<std::byte> packed, scale;
  size_t offset = 0;  // of the weights in `packed`

  int64_t stride() const {
    return kind == Kind::kBf16 ? 2 * k : kind == Kind::kF32 ? 4 * k : k / 2;
  }
};

// From the format's definition: code = (byte >> 4 or & 15), sign bit 3, magnitudes 0 .5 1 1.5 2 3
// 4 6.
enum class Twin { kNone, kSwappedNibbles, kScaleOfNextGroup, kTransposed, kDropTail };

std::vector<float> mxfp4_values(const Product& p, Twin twin) {
  const double magnitude[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  std::vector<float> w;
  for (int64_t n = 0; n < p.n; ++n) {
    for (int64_t k = 0; k < p.k; ++k) {
      const auto byte =
          static_cast<unsigned>(p.packed[p.offset + static_cast<size_t>(n * p.k / 2 + k / 2)]);
      const bool high = (k % 2 == 1) != (twin == Twin::kSwappedNibbles);
      const unsigned code = high ? byte >> 4 : byte & 15;
      int64_t group = k / 32;
      if (twin == Twin::kScaleOfNextGroup) group = (group + 1) % (p.k / 32);
      const int s = static_cast<int>(p.scale[static_cast<size_t>(n * (p.k / 32) + group)]);
      const double v = std::ldexp(magnitude[code & 7], s - 127);
      w.push_back(static_cast<float>(code & 8 ? -v : v));
    }
  }
  return w;
}

Product product(Random& random, Kind kind, int64_t rows, int64_t n, int64_t k, size_t offset = 0) {
  Product p{kind, rows, n, k, random.normals(rows * k), {}, {}, {}, offset};
  if (kind == Kind::kMxfp4) {
    p.packed = random.bytes(static_cast<int64_t>(offset) + n * k / 2);
    p.scale = random.bytes(n * k / 32, 108, 128);
    p.w = mxfp4_values(p, Twin::kNone);
  } else {
    p.w = random.normals(n * k, 1, kind == Kind::kBf16);
    p.packed = kind == Kind::kBf16 ? bf16_bytes(p.w) : f32_bytes(p.w);
    p.packed.insert(p.packed.begin(), offset, std::byte{0x7f});
  }
  return p;
}

Balls reference(const Product& p, bool bf16, Twin twin = Twin::kNone) {
  const Balls x = exactly(p.x);
  const bool other = twin == Twin::kSwappedNibbles || twin == Twin::kScaleOfNextGroup;
  const Balls w = exactly(other ? mxfp4_values(p, twin) : p.w);
  Balls y;
  for (int64_t r = 0; r < p.rows; ++r) {
    for (int64_t n = 0; n < p.n; ++n) {
      Balls column(w.begin() + n * p.k, w.begin() + (n + 1) * p.k);
      if (twin == Twin::kTransposed) {
        for (int64_t k = 0; k < p.k; ++k) {
          column[static_cast<size_t>(k)] = w[static_cast<size_t>((k * p.n + n) % (p.n * p.k))];
        }
      }
      const int64_t used = twin == Twin::kDropTail ? p.k / 16 * 16 : p.k;
      Ball sum = dot(x.data() + r * p.k, column.data(), used);
      y.push_back(land(sum, bf16));
    }
  }
  return y;
}

class Gemm : public IsaTest {
 protected:
  void call(const Product& p, GemmArgs a) const {
    std::vector<float> scratch = poisoned(kMxfp4Tile * p.k);
    a.k = p.k;
    a.w = p.packed.data() + p.offset;
    a.w_stride = p.stride();
    a.scale = p.scale.data();
    a.scratch = scratch.data();
    if (p.kind == Kind::kBf16) k().gemm_bf16(a);
    if (p.kind == Kind::kF32) k().gemm_f32(a);
    if (p.kind == Kind::kMxfp4) k().gemm_mxfp4(a);
  }
  // Rows [first, first + rows) against all columns, in column blocks of `block`.
  std::vector<float> run(const Product& p, bool bf16, int64_t first, int64_t rows,
                         int64_t block) const {
    std::vector<float> y = poisoned(rows * p.n);
    for (int64_t n = 0; n < p.n; n += block) {
      GemmArgs a;
      a.x = p.x.data() + first * p.k;
      a.ldx = p.k;
      a.rows = rows;
      a.n_begin = n;
      a.n_end = std::min(n + block, p.n);
      a.y = y.data();
      a.ldy = p.n;
      a.land_bf16 = bf16;
      call(p, a);
    }
    return y;
  }
  std::vector<float> run(const Product& p, bool bf16) const { return run(p, bf16, 0, p.rows, p.n); }
};

const Kind kKinds[] = {Kind::kBf16, Kind::kF32, Kind::kMxfp4};

TEST_P(Gemm, IsTheSumOfProductsForEveryRowCountTailAndWidth) {
  Random random(51);
  for (const Kind kind : kKinds) {
    for (const bool bf16 : {false, true}) {
      for (int64_t rows = 1; rows <= 33; rows += rows < 10 ? 1 : 4) {
        for (const int64_t n : {1, 3, 4, 9, 21}) {
          for (int64_t k : {1, 16, 37, 100}) {
            if (kind == Kind::kMxfp4) k = (k + 31) / 32 * 32;
            const Product p = product(random, kind, rows, n, k);
            EXPECT_WITHIN(run(p, bf16), reference(p, bf16))
                << static_cast<int>(kind) << " rows " << rows << " n " << n << " k " << k;
          }
        }
      }
    }
  }
}

TEST_P(Gemm, WrongTwinsTrip) {
  Random random(52);
  for (const Kind kind : kKinds) {
    const bool mx = kind == Kind::kMxfp4;
    for (const bool bf16 : {false, true}) {
      const Product p = product(random, kind, 5, 9, mx ? 96 : 85);
      const Balls want = reference(p, bf16);
      EXPECT_WITHIN(run(p, bf16), want);
      EXPECT_TRIPS(reference(p, bf16, Twin::kTransposed), want);
      if (mx) {
        EXPECT_TRIPS(reference(p, bf16, Twin::kSwappedNibbles), want);
        EXPECT_TRIPS(reference(p, bf16, Twin::kScaleOfNextGroup), want);
      } else {
        EXPECT_TRIPS(reference(p, bf16, Twin::kDropTail), want);
      }
      EXPECT_TRIPS(run(p, !bf16), want) << "landed and not landed must differ";
    }
  }
}

// The order of the sum is promised, so one sum's bits can be written down.
TEST_P(Gemm, AddsInThePromisedOrder) {
  Random random(53);
  for (const Kind kind : kKinds) {
    const Product p = product(random, kind, 4, 5, kind == Kind::kMxfp4 ? 160 : 155);
    std::vector<float> want, straight;
    for (int64_t r = 0; r < p.rows; ++r) {
      for (int64_t n = 0; n < p.n; ++n) {
        float lane[16] = {}, run_on = 0;
        for (int64_t k = 0; k < p.k; ++k) {
          const float x = p.x[static_cast<size_t>(r * p.k + k)];
          const float w = p.w[static_cast<size_t>(n * p.k + k)];
          lane[k % 16] = std::fma(x, w, lane[k % 16]);
          run_on = std::fma(x, w, run_on);
        }
        for (int step = 8; step > 0; step /= 2) {
          for (int l = 0; l < step; ++l) lane[l] += lane[l + step];
        }
        want.push_back(lane[0]);
        straight.push_back(run_on);
      }
    }
    EXPECT_SAME_BITS(run(p, false), want);
    EXPECT_OTHER_BITS(straight, want);
  }
}

TEST_P(Gemm, ARowsBitsAreItsOwnInAnyBatchAndAnyBlockOfColumns) {
  Random random(54);
  for (const Kind kind : kKinds) {
    for (const bool bf16 : {false, true}) {
      const Product p = product(random, kind, 33, 21, kind == Kind::kMxfp4 ? 64 : 75);
      std::vector<float> alone;
      for (int64_t r = 0; r < p.rows; ++r) {
        const std::vector<float> y = run(p, bf16, r, 1, p.n);
        alone.insert(alone.end(), y.begin(), y.end());
      }
      for (int64_t rows = 2; rows <= 33; ++rows) {
        const int64_t first = 33 - rows;
        const std::vector<float> want(alone.begin() + first * p.n, alone.end());
        ASSERT_EQ(bits_differ(run(p, bf16, first, rows, p.n), want), "") << rows;
      }
      for (int64_t block = 1; block <= 21; ++block) {
        ASSERT_EQ(bits_differ(run(p, bf16, 0, 33, block), alone), "") << block;
        ASSERT_EQ(bits_differ(run(p, bf16, 0, 1, block), {alone.begin(), alone.begin() + p.n}), "")
            << block;
      }
    }
  }
}

TEST_P(Gemm, UnalignedWeightsGiveTheSameBits) {
  Random random(55);
  for (const Kind kind : kKinds) {
    for (const int64_t rows : {1, 2, 7}) {
      Product p = product(random, kind, rows, 11, kind == Kind::kMxfp4 ? 96 : 83);
      const std::vector<float> aligned = run(p, false);
      // f32 weights are this program's own and stay aligned to their elements.
      const size_t by = kind == Kind::kF32 ? 4 : 1;
      p.packed.insert(p.packed.begin(), by, std::byte{0xee});
      p.offset = by;
      if (kind == Kind::kMxfp4) p.scale.insert(p.scale.begin(), std::byte{0xee});
      std::vector<std::byte> scale = p.scale;
      std::vector<float> y = poisoned(rows * p.n), scratch = poisoned(kMxfp4Tile * p.k);
      GemmArgs a;
      a.x = p.x.data();
      a.ldx = p.k;
      a.rows = rows;
      a.k = p.k;
      a.w = p.packed.data() + by;
      a.w_stride = p.stride();
      if (kind == Kind::kMxfp4) a.scale = scale.data() + 1;
      a.n_end = p.n;
      a.y = y.data();
      a.ldy = p.n;
      a.scratch = scratch.data();
      (kind == Kind::kBf16 ? k().gemm_bf16 : kind == Kind::kF32 ? k().gemm_f32 : k().gemm_mxfp4)(a);
      EXPECT_SAME_BITS(y, aligned);
      a.w -= by;
      (kind == Kind::kBf16 ? k().gemm_bf16 : kind == Kind::kF32 ? k().gemm_f32 : k().gemm_mxfp4)(a);
      EXPECT_OTHER_BITS(y, aligned);
    }
  }
}

// Gathered rows, scattered rows, a column offset, strides wider than the data: as the experts call
// it.
TEST_P(Gemm, IndexedRowsAndColumnsLandWhereTheySayAndNowhereElse) {
  Random random(56);
  for (const Kind kind : kKinds) {
    for (const int64_t rows : {2, 5}) {
      const int64_t k_count = kind == Kind::kMxfp4 ? 64 : 50, n = 13, ldx = k_count + 5, ldy = 9;
      Product p = product(random, kind, 8, n, k_count);
      const std::vector<float> plain = run(p, false);
      std::vector<float> wide = poisoned(8 * ldx);
      for (int64_t r = 0; r < 8; ++r) {
        std::copy_n(p.x.begin() + r * k_count, k_count, wide.begin() + r * ldx);
      }
      const std::vector<int32_t> from = {6, 0, 3, 7, 3}, to = {2, 9, 0, 4, 7};
      std::vector<float> y = poisoned(10 * ldy), want = y;
      GemmArgs a;
      a.x = wide.data();
      a.ldx = ldx;
      a.x_index = from.data();
      a.rows = rows;
      a.n_begin = 4;
      a.n_end = 11;
      a.y_column = 3;
      a.y = y.data();
      a.ldy = ldy;
      a.y_index = to.data();
      call(p, a);
      for (size_t r = 0; r < static_cast<size_t>(rows); ++r) {
        for (int64_t c = 4; c < 11; ++c) {
          want[static_cast<size_t>(to[r] * ldy + c - 3)] =
              plain[static_cast<size_t>(from[r] * n + c)];
        }
      }
      EXPECT_SAME_BITS(y, want);
    }
  }
}

TEST_P(Gemm, ExtremeScalesKeepTheirExactMeaning) {
  Random random(57);
  for (const int64_t rows : {2, 6}) {
    Product p = product(random, Kind::kMxfp4, rows, 10, 128);
    for (std::byte& s : p.scale) {
      const int extreme[] = {0, 1, 2, 127, 200, 220};
      s = static_cast<std::byte>(extreme[random.integer(0, 5)]);
    }
    p.w = mxfp4_values(p, Twin::kNone);
    EXPECT_WITHIN(run(p, false), reference(p, false));
    // One NaN scale: its weight row is NaN and no other.
    p.scale[4 * 3 + 1] = std::byte{255};
    const std::vector<float> y = run(p, false);
    for (size_t i = 0; i < y.size(); ++i) EXPECT_EQ(std::isnan(y[i]), i % 10 == 3);
  }
}

// y[r, d] = sum_n x[r, n] w[n, d]: d_count fused chains of n_count products, n ascending.
TEST_P(Gemm, TheTransposedProductIsItsEquationWithRowsIndependent) {
  Random random(58);
  for (const bool bf16 : {false, true}) {
    for (const int64_t rows : {1, 2, 3, 4, 5, 8, 17}) {
      for (const int64_t d_count : {5, 16, 40, 67}) {
        const int64_t n_begin = 3, n_count = 19, ldx = n_count + 2, ldy = d_count + 4;
        const std::vector<float> x = random.normals(rows * ldx);
        const std::vector<float> w = random.normals((n_begin + n_count) * d_count, 1, true);
        const size_t offset = rows % 2;
        const std::vector<std::byte> bytes = bf16_bytes(w, offset);
        GemmArgs a;
        a.x = x.data();
        a.ldx = ldx;
        a.rows = rows;
        a.k = d_count;
        a.w = bytes.data() + offset;
        a.w_stride = 2 * d_count;
        a.n_begin = n_begin;
        a.n_end = n_begin + n_count;
        a.ldy = ldy;
        a.land_bf16 = bf16;
        std::vector<float> y = poisoned(rows * ldy);
        a.y = y.data();
        k().gemm_bf16_t(a);
        for (int64_t r = 0; r < rows; ++r) {
          Balls want, from_zero;
          for (int64_t d = 0; d < d_count; ++d) {
            Balls column, shifted;
            for (int64_t n = 0; n < n_count; ++n) {
              column.push_back(exactly(w[static_cast<size_t>((n_begin + n) * d_count + d)]));
              shifted.push_back(exactly(w[static_cast<size_t>(n * d_count + d)]));
            }
            const Balls row = exactly({x.begin() + r * ldx, x.begin() + r * ldx + n_count});
            want.push_back(land(dot(row.data(), column.data(), n_count, n_count), bf16));
            from_zero.push_back(land(dot(row.data(), shifted.data(), n_count, n_count), bf16));
          }
          const std::vector<float> got(y.begin() + r * ldy, y.begin() + r * ldy + d_count);
          EXPECT_WITHIN(got, want) << rows << " " << d_count;
          EXPECT_TRIPS(from_zero, want);
          EXPECT_TRUE(std::isnan(y[static_cast<size_t>(r * ldy + d_count)]))
              << "wrote past its row";
          std::vector<float> alone = poisoned(d_count);
          GemmArgs one = a;
          one.x = x.data() + r * ldx;
          one.rows = 1;
          one.y = alone.data();
          k().gemm_bf16_t(one);
          EXPECT_SAME_BITS(alone, got);
        }
      }
    }
  }
}

K3_EVERY_ISA(Gemm);

}  // namespace
}  // namespace k3::gate
