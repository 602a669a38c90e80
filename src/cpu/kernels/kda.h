// Kimi Delta Attention, one head over a segment: the token recurrence, the reference form.
// A chunkwise form would be faster in prefill but sums in another order, so a token's bits would
// depend on how the tokens arrived (docs/numerics.md). Included per ISA.
#pragma once

#include "cpu/kernels/elementwise.h"

namespace k3::K3_ISA_NS {

// Causal depthwise convolution and SiLU of one token of one of q, k, v. History before the segment
// comes from the window (zero when fresh).
inline void conv_silu(const KdaArgs& a, const float* x, const float* taps, const float* window,
                      int64_t t, float* y) {
  const int64_t w = a.conv_width;
  for_lanes(a.head_dim, [&](int64_t i, int64_t c) {
    V acc = vzero();
    for (int64_t j = 0; j < w; ++j) {
      const int64_t at = t - (w - 1) + j;  // token this tap looks at
      if (at < 0 && a.fresh) continue;
      const float* value = at >= 0 ? x + at * a.qkv_stride : window + (at + w - 1) * a.head_dim;
      acc = vfma(vload_n(taps + j * a.conv_stride + i, c), vload_n(value + i, c), acc);
    }
    vstore_n(y + i, vland(vsilu(acc), a.bf16), c);
  });
}

inline void scale_by(float* x, float s, int64_t n) {
  for_lanes(n, [&](int64_t i, int64_t c) { vstore_n(x + i, vmul(vload_n(x + i, c), vset(s)), c); });
}

// S[v][k] of rows [0, head_dim): decay, predict, correct, read (spec 3.3 step 6).
inline void kda_token(float* state, const float* q, const float* k, const float* v,
                      const float* decay, float beta, float* out, int64_t dim) {
  for (int64_t j = 0; j < dim; ++j) {
    float* s = state + j * dim;
    V predicted = vzero();
    for_lanes(dim, [&](int64_t i, int64_t c) {
      const V decayed = vmul(vload_n(s + i, c), vload_n(decay + i, c));
      vstore_n(s + i, decayed, c);
      predicted = vfma(decayed, vload_n(k + i, c), predicted);
    });
    const V step = vset(beta * (v[j] - vsum(predicted)));
    V read = vzero();
    for_lanes(dim, [&](int64_t i, int64_t c) {
      const V updated = vfma(step, vload_n(k + i, c), vload_n(s + i, c));
      vstore_n(s + i, updated, c);
      read = vfma(updated, vload_n(q + i, c), read);
    });
    out[j] = vsum(read);
  }
}

inline void kda(const KdaArgs& a) {
  const int64_t dim = a.head_dim;
  const int64_t history = a.conv_width - 1;
  float* q = a.scratch;
  float* k = q + dim;
  float* v = k + dim;
  float* decay = v + dim;
  if (a.fresh) std::memset(a.state, 0, static_cast<size_t>(dim * dim) * sizeof(float));
  const float q_scale = 1.f / std::sqrt(static_cast<float>(dim));
  for (int64_t t = 0; t < a.tokens; ++t) {
    conv_silu(a, a.q, a.q_conv, a.window, t, q);
    conv_silu(a, a.k, a.k_conv, a.window + history * dim, t, k);
    conv_silu(a, a.v, a.v_conv, a.window + 2 * history * dim, t, v);
    // L2 norm with epsilon added to the sum, inside the root; then q takes head_dim^-0.5.
    scale_by(q, 1.f / std::sqrt(sum_of_squares(q, dim) + a.l2_eps), dim);
    scale_by(q, q_scale, dim);
    scale_by(k, 1.f / std::sqrt(sum_of_squares(k, dim) + a.l2_eps), dim);
    const float* raw = a.decay + t * a.decay_stride;
    for_lanes(dim, [&](int64_t i, int64_t c) {
      const V z = vmul(vset(a.exp_a), vadd(vload_n(raw + i, c), vload_n(a.dt_bias + i, c)));
      vstore_n(decay + i, vexp(vmul(vset(a.gate_lower_bound), vsigmoid(z))), c);
    });
    const float beta = vfirst(vsigmoid(vset(a.beta[t * a.beta_stride])));
    float* out = a.out + t * a.out_stride;
    kda_token(a.state, q, k, v, decay, beta, out, dim);
    if (a.bf16) {
      for_lanes(dim, [&](int64_t i, int64_t c) {
        vstore_n(out + i, vround_bf16(vload_n(out + i, c)), c);
      });
    }
    const V r = vset(rsqrt_mean(sum_of_squares(out, dim), dim, a.rms_eps));
    const float* gate = a.gate + t * a.gate_stride;
    for_lanes(dim, [&](int64_t i, int64_t c) {
      const V n = vmul(vmul(vload_n(out + i, c), r), vload_n(a.o_norm + i, c));
      vstore_n(out + i, vland(vmul(n, vsigmoid(vload_n(gate + i, c))), a.bf16), c);
    });
  }
  // The window for what follows: the last conv_width - 1 raw projections, older ones moving up.
  const float* raw[3] = {a.q, a.k, a.v};
  for (int s = 0; s < 3; ++s) {
    float* window = a.window + s * history * dim;
    for (int64_t j = 0; j < history; ++j) {
      const int64_t at = a.tokens - history + j;
      float* to = window + j * dim;
      if (at >= 0) {
        std::memcpy(to, raw[s] + at * a.qkv_stride, static_cast<size_t>(dim) * sizeof(float));
      } else if (a.fresh) {
        std::memset(to, 0, static_cast<size_t>(dim) * sizeof(float));
      } else {
        std::memcpy(to, window + (at + history) * dim, static_cast<size_t>(dim) * sizeof(float));
      }
    }
  }
}

}  // namespace k3::K3_ISA_NS
