// What the stage gates share: seeded inputs, poisoned outputs, one comparison, one fixture per ISA.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "cpu/ball.h"
#include "cpu/kernels/kernels.h"

namespace k3::gate {

inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
inline constexpr float kInf = std::numeric_limits<float>::infinity();

// The first element outside its bound, in words; "" when every one is inside. NaN is outside.
inline std::string outside(const std::vector<float>& got, const Balls& want) {
  if (got.size() != want.size()) return cat("size ", got.size(), ", expected ", want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    if (!(std::abs(got[i] - want[i].v) <= want[i].r)) {
      return cat("element ", i, ": ", got[i], ", expected ", want[i].v, " +- ", want[i].r);
    }
  }
  return {};
}
// A wrong twin goes through the same comparison as the kernel and must not pass it.
inline std::string outside(const Balls& twin, const Balls& want) {
  return outside(centres(twin), want);
}
#define EXPECT_WITHIN(got, want) EXPECT_EQ(::k3::gate::outside(got, want), "")
#define EXPECT_TRIPS(twin, want) EXPECT_NE(::k3::gate::outside(twin, want), "")

// Same bits, element for element; a NaN equals any NaN (which of two NaNs an operation returns is
// the instruction set's).
inline std::string bits_differ(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return cat("size ", a.size(), " and ", b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    if (std::isnan(a[i]) && std::isnan(b[i])) continue;
    if (f32_bits(a[i]) != f32_bits(b[i])) return cat("element ", i, ": ", a[i], " and ", b[i]);
  }
  return {};
}
#define EXPECT_SAME_BITS(a, b) EXPECT_EQ(::k3::gate::bits_differ(a, b), "")
#define EXPECT_OTHER_BITS(a, b) EXPECT_NE(::k3::gate::bits_differ(a, b), "")

class Random {
 public:
  explicit Random(uint32_t seed) : engine_(seed) {}
  double uniform(double lo, double hi) { return lo + (hi - lo) * (engine_() * 0x1p-32); }
  int64_t integer(int64_t lo, int64_t hi) { return lo + engine_() % (hi - lo + 1); }
  // About normal: twelve uniforms, the same on every standard library.
  float normal(double sd) {
    double s = -6;
    for (int i = 0; i < 12; ++i) s += uniform(0, 1);
    return static_cast<float>(sd * s);
  }
  std::vector<float> normals(int64_t n, double sd = 1, bool bf16 = false) {
    std::vector<float> x(static_cast<size_t>(n));
    for (float& v : x) v = bf16 ? static_cast<float>(nearest_bf16(normal(sd))) : normal(sd);
    return x;
  }
  std::vector<std::byte> bytes(int64_t n, int lo = 0, int hi = 255) {
    std::vector<std::byte> b(static_cast<size_t>(n));
    for (std::byte& v : b) v = static_cast<std::byte>(integer(lo, hi));
    return b;
  }

 private:
  std::mt19937 engine_;
};

inline std::vector<float> poisoned(int64_t n) {
  return std::vector<float>(static_cast<size_t>(n), kNaN);
}

// bf16 values as a checkpoint holds them, `offset` bytes into the buffer (odd: unaligned).
inline std::vector<std::byte> bf16_bytes(const std::vector<float>& x, size_t offset = 0) {
  std::vector<std::byte> out(offset + 2 * x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    const uint16_t h = f32_to_bf16(x[i]);
    std::memcpy(out.data() + offset + 2 * i, &h, 2);
  }
  return out;
}
inline std::vector<std::byte> f32_bytes(const std::vector<float>& x) {
  std::vector<std::byte> out(4 * x.size());
  std::memcpy(out.data(), x.data(), out.size());
  return out;
}

// One claim, held on every instruction set this machine has.
class IsaTest : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    Result<const Kernels*> kernels = select_kernels(GetParam());
    if (!kernels.ok()) GTEST_SKIP() << kernels.status().message();
    kernels_ = *kernels;
  }
  const Kernels& k() const { return *kernels_; }

 private:
  const Kernels* kernels_ = nullptr;
};
#define K3_EVERY_ISA(suite)                                                        \
  INSTANTIATE_TEST_SUITE_P(, suite, testing::Values("portable", "avx2", "avx512"), \
                           [](const auto& isa) { return std::string(isa.param); })

}  // namespace k3::gate
