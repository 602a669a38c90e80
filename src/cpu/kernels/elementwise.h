// Norms, mixes and activations: one token's vectors at a time. Included per ISA.
#pragma once

#include "cpu/kernels/kernels.h"
#include "cpu/kernels/math.h"

namespace k3::K3_ISA_NS {

template <typename F>
inline void for_lanes(int64_t n, F&& f) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) f(i, kLanes);
  if (i < n) f(i, n - i);
}

inline float sum_of_squares(const float* x, int64_t n) {
  V acc = vzero();
  for_lanes(n, [&](int64_t i, int64_t c) {
    const V v = vload_n(x + i, c);
    acc = vfma(v, v, acc);
  });
  return vsum(acc);
}

inline float rsqrt_mean(float sum, int64_t n, float eps) {
  return 1.f / std::sqrt(sum / static_cast<float>(n) + eps);
}

inline void rms_norm(const RmsNormArgs& a) {
  const V r = vset(rsqrt_mean(sum_of_squares(a.x, a.n), a.n, a.eps));
  for_lanes(a.n, [&](int64_t i, int64_t c) {
    const V y = vland(vmul(vload_n(a.x + i, c), r), a.bf16);
    vstore_n(a.y + i, vland(vmul(y, vload_n(a.gain + i, c)), a.bf16), c);
  });
}

inline void attn_res(const AttnResArgs& a) {
  float p[kMaxSnapshots + 1];
  float top = 0;
  for (int64_t s = 0; s <= a.count; ++s) {
    const float* v = s < a.count ? a.snapshots + s * a.snapshot_stride : a.stream;
    V squares = vzero(), dot = vzero();
    for_lanes(a.n, [&](int64_t i, int64_t c) {
      const V x = vload_n(v + i, c);
      squares = vfma(x, x, squares);
      dot = vfma(x, vload_n(a.fold + i, c), dot);
    });
    p[s] = vsum(dot) * rsqrt_mean(vsum(squares), a.n, a.eps);
    top = s == 0 || p[s] > top ? p[s] : top;
  }
  float sum = 0;
  for (int64_t s = 0; s <= a.count; ++s) {
    p[s] = vfirst(vexp(vset(p[s] - top)));
    sum += p[s];
  }
  for (int64_t s = 0; s <= a.count; ++s) p[s] /= sum;
  for_lanes(a.n, [&](int64_t i, int64_t c) {
    V acc = vzero();
    for (int64_t s = 0; s < a.count; ++s) {
      acc = vfma(vset(p[s]), vload_n(a.snapshots + s * a.snapshot_stride + i, c), acc);
    }
    acc = vfma(vset(p[a.count]), vload_n(a.stream + i, c), acc);
    vstore_n(a.out + i, vland(acc, a.bf16), c);
  });
}

inline void situ(const float* g, const float* u, float* out, int64_t n, float beta,
                 float linear_beta, bool bf16) {
  for_lanes(n, [&](int64_t i, int64_t c) {
    const V y = vsitu(vload_n(g + i, c), vload_n(u + i, c), vset(beta), vset(linear_beta));
    vstore_n(out + i, vland(y, bf16), c);
  });
}

inline void sigmoid_gate(float* x, const float* gate, int64_t n, bool bf16) {
  for_lanes(n, [&](int64_t i, int64_t c) {
    const V s = vland(vsigmoid(vload_n(gate + i, c)), bf16);
    vstore_n(x + i, vland(vmul(vload_n(x + i, c), s), bf16), c);
  });
}

inline void add(const float* a, const float* b, float* y, int64_t n, bool bf16) {
  for_lanes(n, [&](int64_t i, int64_t c) {
    vstore_n(y + i, vland(vadd(vload_n(a + i, c), vload_n(b + i, c)), bf16), c);
  });
}

inline void combine(const float* rows, int64_t stride, const float* weights, int64_t count,
                    float* y, int64_t n, bool bf16) {
  for_lanes(n, [&](int64_t i, int64_t c) {
    V acc = vzero();
    for (int64_t s = 0; s < count; ++s) {
      acc = vfma(vset(weights[s]), vload_n(rows + s * stride + i, c), acc);
    }
    vstore_n(y + i, vland(acc, bf16), c);
  });
}

inline void bf16_to_f32(const std::byte* in, float* out, int64_t n) {
  for_lanes(n, [&](int64_t i, int64_t c) { vstore_n(out + i, vload_bf16_n(in + 2 * i, c), c); });
}
inline void f32_to_bf16(const float* in, std::byte* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const uint16_t h = ::k3::f32_to_bf16(in[i]);
    std::memcpy(out + 2 * i, &h, 2);
  }
}

template <V (*F)(V)>
inline void map(const float* x, float* y, int64_t n) {
  for_lanes(n, [&](int64_t i, int64_t c) { vstore_n(y + i, F(vload_n(x + i, c)), c); });
}
inline V exp_lanes(V x) { return vexp(x); }
inline V sigmoid_lanes(V x) { return vsigmoid(x); }
inline V tanh_lanes(V x) { return vtanh(x); }

}  // namespace k3::K3_ISA_NS
