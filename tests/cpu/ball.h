// Float64 values that carry a bound on how far a float32 evaluation of the same equation may be.
//
// A stage gate writes the equation once, in Balls. The centre is the float64 value, the radius is
// the running error bound of the float32 form: every operation the kernel rounds adds half an ulp
// of its result (u |v|, u = 2^-24, plus half the smallest subnormal), and what the operands may be
// off by is carried through by the triangle inequality. A sum of products is bounded for the order
// the kernels promise (docs/numerics.md): each product passes ceil(n / 16) fused adds of its lane
// and four adds of the tree, so |err| <= (ceil(n / 16) + 4) u sum |x w|. Nothing is fitted to what
// the kernels give.
//
// A bf16 landing maps the interval [v - r, v + r] to the interval of its two rounded ends: mostly
// one bf16 value with radius 0, and then the gate demands that very value.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace k3::gate {

// Half an ulp; the margin covers products of two bounds and the rounding of the float64 itself.
inline constexpr double kUnit = 0x1p-24 * (1 + 1e-5);
inline constexpr double kTiny = 0x1p-149;

struct Ball {
  double v = 0, r = 0;
};

using Balls = std::vector<Ball>;

inline Ball exactly(double v) { return {v, 0}; }
inline Balls exactly(const std::vector<float>& x) {
  Balls b;
  for (const float v : x) b.push_back({v, 0});
  return b;
}

inline Ball rounded(double v, double r, double roundings = 1) {
  return {v, r + roundings * (kUnit * (std::abs(v) + r) + kTiny)};
}
inline Ball operator-(Ball a) { return {-a.v, a.r}; }
inline Ball operator+(Ball a, Ball b) { return rounded(a.v + b.v, a.r + b.r); }
inline Ball operator-(Ball a, Ball b) { return rounded(a.v - b.v, a.r + b.r); }
inline double product_radius(Ball a, Ball b) {
  return std::abs(a.v) * b.r + std::abs(b.v) * a.r + a.r * b.r;
}
inline Ball operator*(Ball a, Ball b) { return rounded(a.v * b.v, product_radius(a, b)); }
// a * b + c, rounded once.
inline Ball fused(Ball a, Ball b, Ball c) {
  return rounded(a.v * b.v + c.v, product_radius(a, b) + c.r);
}
inline Ball operator/(Ball a, Ball b) {
  const double v = a.v / b.v;
  return rounded(v, (a.r + std::abs(v) * b.r) / (std::abs(b.v) - b.r));
}
inline Ball sqrt(Ball a) {
  const double v = std::sqrt(a.v);
  return rounded(v, v - std::sqrt(std::max(0.0, a.v - a.r)));
}

// The sixteen-lane sum of products.
inline double lane_roundings(int64_t n) { return static_cast<double>((n + 15) / 16 + 4); }
inline Ball dot(const Ball* x, const Ball* w, int64_t n, double roundings) {
  double sum = 0, carried = 0, size = 0;
  for (int64_t i = 0; i < n; ++i) {
    sum += x[i].v * w[i].v;
    carried += product_radius(x[i], w[i]);
    size += (std::abs(x[i].v) + x[i].r) * (std::abs(w[i].v) + w[i].r);
  }
  return {sum, carried + roundings * kUnit * size + static_cast<double>(n + 20) * kTiny};
}
inline Ball dot(const Ball* x, const Ball* w, int64_t n) { return dot(x, w, n, lane_roundings(n)); }
inline Ball sum_of_squares(const Ball* x, int64_t n) { return dot(x, x, n); }
// 1 / sqrt(sum / n + eps), as every norm forms it (n = 1: the sum itself).
inline Ball inverse_root(Ball sum, double n, float eps) {
  return exactly(1) / sqrt((n == 1 ? sum : sum / exactly(n)) + exactly(eps));
}

// Elementary functions: monotone, so the ends of the interval bound the middle; then the accuracy
// that elementary_test.cc holds them to, in ulp (1 ulp <= 2 u |v|). Outside [-87, 88] exp
// saturates, which is below 2e-38 absolute in what is made of it here.
inline constexpr double kExpUlps = 1.2, kSigmoidUlps = 2.6, kTanhUlps = 2.6;
template <typename F>
Ball monotone(F f, Ball x, double ulps) {
  const double v = f(x.v), lo = f(x.v - x.r), hi = f(x.v + x.r);
  const double r = std::max(std::abs(hi - v), std::abs(v - lo));
  return {v, r + 2 * ulps * kUnit * (std::abs(v) + r) + 2e-38};
}
inline double sigmoid_of(double x) { return 1 / (1 + std::exp(-x)); }
inline Ball exp(Ball x) {
  return monotone([](double t) { return std::exp(t); }, x, kExpUlps);
}
inline Ball sigmoid(Ball x) { return monotone(sigmoid_of, x, kSigmoidUlps); }
inline Ball tanh(Ball x) {
  return monotone([](double t) { return std::tanh(t); }, x, kTanhUlps);
}

// Nearest bf16 (8 significand bits, quantum at least 2^-133), ties to even, from the definition.
inline double nearest_bf16(double x) {
  if (x == 0 || !std::isfinite(x)) return x;
  int e;
  std::frexp(x, &e);
  const double quantum = std::ldexp(1.0, std::max(e - 8, -133));
  return std::nearbyint(x / quantum) * quantum;
}
inline Ball land(Ball x, bool bf16) {
  if (!bf16) return x;
  const double lo = nearest_bf16(x.v - x.r), hi = nearest_bf16(x.v + x.r);
  return {(lo + hi) / 2, (hi - lo) / 2};
}

inline std::vector<float> centres(const Balls& b) {
  std::vector<float> out;
  for (const Ball& x : b) out.push_back(static_cast<float>(x.v));
  return out;
}

}  // namespace k3::gate
