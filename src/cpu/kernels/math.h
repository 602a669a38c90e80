// exp, tanh and what is made of them, sixteen lanes at a time and the same bits on every ISA.
// Accuracy (held against double in tests/cpu): exp within 1.2 ulp on [-87, 88], where it saturates;
// sigmoid and tanh within 2.6 ulp. Included per ISA.
#pragma once

#include "cpu/kernels/simd.h"

namespace k3::K3_ISA_NS {

// e^r - 1 for |r| <= ln2/2 by its Taylor series to r^7; the next term is below 1e-8 of the result.
inline V expm1_reduced(V r) {
  V p = vset(1.f / 5040.f);
  p = vfma(p, r, vset(1.f / 720.f));
  p = vfma(p, r, vset(1.f / 120.f));
  p = vfma(p, r, vset(1.f / 24.f));
  p = vfma(p, r, vset(1.f / 6.f));
  p = vfma(p, r, vset(0.5f));
  return vfma(vmul(p, r), r, r);
}

// x = n ln2 + r, with ln2 split so that n * hi is exact for |n| < 2^10.
inline V reduce_ln2(V x, V* n) {
  *n = vround(vmul(x, vset(1.44269504088896341f)));
  const V r = vfma(*n, vset(-0.693359375f), x);
  return vfma(*n, vset(2.12194440e-4f), r);
}

// NaN passes through (vmax and vmin return their second operand when either is NaN).
inline V vexp(V x) {
  x = vmin(vset(88.f), vmax(vset(-87.f), x));
  V n;
  const V r = reduce_ln2(x, &n);
  const V scale = vpow2i(n);
  return vfma(expm1_reduced(r), scale, scale);
}

inline V vsigmoid(V x) {
  const V one = vset(1.f);
  return vdiv(one, vadd(one, vexp(vsub(vzero(), x))));
}

// tanh x = (e^2x - 1) / (e^2x + 1), by expm1 so that small x keep their relative accuracy.
inline V vtanh(V x) {
  V y = vadd(x, x);
  y = vmin(vset(40.f), vmax(vset(-40.f), y));
  V n;
  const V r = reduce_ln2(y, &n);
  const V scale = vpow2i(n);
  const V e = vfma(expm1_reduced(r), scale, vsub(scale, vset(1.f)));
  return vdiv(e, vadd(e, vset(2.f)));
}

inline V vsilu(V x) { return vmul(x, vsigmoid(x)); }

// situ(g, u) = beta tanh(g / beta) sigmoid(g) * linear_beta tanh(u / linear_beta)
inline V vsitu(V g, V u, V beta, V linear_beta) {
  const V a = vmul(vmul(beta, vtanh(vdiv(g, beta))), vsigmoid(g));
  return vmul(a, vmul(linear_beta, vtanh(vdiv(u, linear_beta))));
}

inline V vland(V x, bool bf16) { return bf16 ? vround_bf16(x) : x; }
inline float land(float x, bool bf16) { return bf16 ? round_to_bf16(x) : x; }

}  // namespace k3::K3_ISA_NS
