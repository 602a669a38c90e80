// RMSNorm: y = x r gain, r = 1 / sqrt(mean(x^2) + eps). The bf16 policy rounds x r before the gain
// and the product after it.
#include "cpu/stage_gate.h"

namespace k3::gate {
namespace {

enum class Twin { kNone, kGainBeforeRounding, kOneLanding, kEpsOnSum, kEpsOutsideRoot, kNoMean };

Balls norm(const std::vector<float>& x, const std::vector<float>& gain, float eps, bool bf16,
           Twin twin = Twin::kNone) {
  const Balls b = exactly(x), g = exactly(gain);
  const auto n = static_cast<int64_t>(x.size());
  const Ball sum = sum_of_squares(b.data(), n);
  Ball r = inverse_root(sum, static_cast<double>(n), eps);
  if (twin == Twin::kEpsOnSum) r = exactly(1) / sqrt((sum + exactly(eps)) / exactly(n));
  if (twin == Twin::kEpsOutsideRoot) r = exactly(1) / (sqrt(sum / exactly(n)) + exactly(eps));
  if (twin == Twin::kNoMean) r = exactly(1) / sqrt(sum + exactly(eps));
  Balls y;
  for (size_t i = 0; i < x.size(); ++i) {
    Ball v = b[i] * r * g[i];
    if (bf16 && twin == Twin::kNone) v = land(b[i] * r, true) * g[i];
    if (bf16 && twin == Twin::kGainBeforeRounding) v = land(b[i] * g[i], true) * r;
    y.push_back(land(v, bf16));
  }
  return y;
}

class RmsNorm : public IsaTest {
 protected:
  std::vector<float> run(const std::vector<float>& x, const std::vector<float>& gain, float eps,
                         bool bf16) const {
    const auto n = static_cast<int64_t>(x.size());
    std::vector<float> y = poisoned(n);
    k().rms_norm({x.data(), gain.data(), n, eps, y.data(), bf16});
    return y;
  }
};

TEST_P(RmsNorm, IsTheEquationOnEveryWidth) {
  Random random(11);
  for (const bool bf16 : {false, true}) {
    for (const int64_t n : {1, 2, 15, 16, 17, 31, 33, 64, 129, 576, 1000}) {
      const std::vector<float> x = random.normals(n, 3, bf16), gain = random.normals(n, 1, bf16);
      EXPECT_WITHIN(run(x, gain, 1e-5f, bf16), norm(x, gain, 1e-5f, bf16)) << n << " " << bf16;
    }
  }
}

TEST_P(RmsNorm, MayWriteOverItsInput) {
  Random random(12);
  std::vector<float> x = random.normals(77), gain = random.normals(77);
  const std::vector<float> apart = run(x, gain, 1e-5f, true);
  k().rms_norm({x.data(), gain.data(), 77, 1e-5f, x.data(), true});
  EXPECT_SAME_BITS(x, apart);
}

TEST_P(RmsNorm, WrongTwinsTrip) {
  Random random(13);
  const std::vector<float> x = random.normals(300, 2e-3, true), gain = random.normals(300, 1, true);
  for (const bool bf16 : {false, true}) {
    const Balls want = norm(x, gain, 1e-5f, bf16);
    EXPECT_WITHIN(run(x, gain, 1e-5f, bf16), want);
    for (const Twin twin : {Twin::kEpsOnSum, Twin::kEpsOutsideRoot, Twin::kNoMean}) {
      EXPECT_TRIPS(norm(x, gain, 1e-5f, bf16, twin), want) << static_cast<int>(twin);
    }
    if (bf16) {
      EXPECT_TRIPS(norm(x, gain, 1e-5f, true, Twin::kGainBeforeRounding), want);
      EXPECT_TRIPS(norm(x, gain, 1e-5f, true, Twin::kOneLanding), want);
    }
  }
}

// The epsilon of MLA's two LoRA norms is a policy because 1e-6 and 1e-5 are different functions
// once the mean square is small; the release's logits do not show which. Here they must not be
// confused.
TEST_P(RmsNorm, TheLoraEpsilonsAreTellableApartOnSmallVectors) {
  Random random(14);
  const std::vector<float> x = random.normals(512, 3e-3), gain = random.normals(512);
  for (const bool bf16 : {false, true}) {
    for (const float eps : {1e-5f, 1e-6f}) {
      EXPECT_WITHIN(run(x, gain, eps, bf16), norm(x, gain, eps, bf16));
      EXPECT_TRIPS(run(x, gain, eps, bf16), norm(x, gain, eps == 1e-5f ? 1e-6f : 1e-5f, bf16));
    }
  }
}

TEST_P(RmsNorm, AZeroVectorIsZeroAndANaNReachesEveryElement) {
  std::vector<float> x(33), gain(33, 2.f);
  for (const float y : run(x, gain, 1e-5f, true)) EXPECT_EQ(y, 0);
  x[32] = kNaN;
  for (const float y : run(x, gain, 1e-5f, true)) EXPECT_TRUE(std::isnan(y));
}

K3_EVERY_ISA(RmsNorm);

}  // namespace
}  // namespace k3::gate
