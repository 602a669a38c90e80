#include "engine/exp.h"

#include <gtest/gtest.h>

#include <cmath>

namespace k3 {
namespace {

TEST(Exp, IsWithinTwoUlpOfTheLibraryFromZeroToItsFloor) {
  double worst = 0;
  for (int i = 0; i <= 700'000; ++i) {
    const double x = kExpFloor * i / 700'000, want = std::exp(x);
    const double ulp = std::nextafter(want, 2.0) - want;
    worst = std::max(worst, std::abs(exp_nonpositive(x) - want) / ulp);
  }
  EXPECT_LE(worst, 2.0);
  EXPECT_GT(worst, 0.0);  // it is not the library's own
}

TEST(Exp, IsOneAtZeroAndNothingAtItsFloor) {
  EXPECT_EQ(exp_nonpositive(0.0), 1.0);
  EXPECT_EQ(exp_nonpositive(-0.0), 1.0);
  EXPECT_LT(exp_nonpositive(kExpFloor), 1e-300);
}

}  // namespace
}  // namespace k3
