// exp(x) for -700 <= x <= 0 in plain double arithmetic without a branch: a loop over it runs in
// vector registers, which the library's does not, and its bits do not depend on the library or on
// the machine's FMA, so neither does a seeded draw. Within 2 ulp of the true value.
#pragma once

#include <bit>
#include <cstdint>

namespace k3 {

inline constexpr double kExpFloor = -700.0;

inline double exp_nonpositive(double x) {
  constexpr double kLog2E = 0x1.71547652b82fep+0;
  // ln 2 in two parts; n times the first is exact for |n| < 2^21.
  constexpr double kLn2High = 0x1.62e42fee00000p-1, kLn2Low = 0x1.a39ef35793c76p-33;
  constexpr double kRound = 0x1.8p52;  // adding it rounds to an integer, held in the low bits

  const double shifted = x * kLog2E + kRound;
  const double n = shifted - kRound;
  const double r = (x - n * kLn2High) - n * kLn2Low;  // |r| <= ln(2) / 2

  // Taylor; the first term left out is r^14 / 14! < 5e-18.
  double p = 1.0 / 6227020800.0;
  p = p * r + 1.0 / 479001600.0;
  p = p * r + 1.0 / 39916800.0;
  p = p * r + 1.0 / 3628800.0;
  p = p * r + 1.0 / 362880.0;
  p = p * r + 1.0 / 40320.0;
  p = p * r + 1.0 / 5040.0;
  p = p * r + 1.0 / 720.0;
  p = p * r + 1.0 / 120.0;
  p = p * r + 1.0 / 24.0;
  p = p * r + 1.0 / 6.0;
  p = p * r + 0.5;
  p = p * r + 1.0;
  p = p * r + 1.0;

  // The integer's low bits, shifted to the exponent, are 2^n less the bias.
  const uint64_t scale_bits = (std::bit_cast<uint64_t>(shifted) << 52) + (uint64_t{1023} << 52);
  return p * std::bit_cast<double>(scale_bits);
}

}  // namespace k3
