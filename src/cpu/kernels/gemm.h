// y[row, n] = sum_k x[row, k] * w[n, k] for n in [n_begin, n_end), float32 accumulation.
//
// The order of the sum is the contract (docs/numerics.md): lane l of sixteen adds the products of
// k = l, l + 16, l + 32, ... in ascending order by fused multiply-adds; the lanes are then added in
// vsum's tree. Blocking over rows and columns only decides which sums are in flight together, so a
// row's bits depend on nothing but that row. Included per ISA.
#pragma once

#include "cpu/kernels/kernels.h"
#include "cpu/kernels/math.h"

namespace k3::K3_ISA_NS {

// How far ahead of a weight load the next lines are asked for. Short rows (k3-nano's are 512 bytes)
// end before the hardware's own prefetchers have found their stream.
inline constexpr int64_t kPrefetchBytes = 2048;

// Weight rows as the microkernel reads them: step s gives elements [16 s, 16 s + 16).
struct Bf16Weights {
  const std::byte* base;
  int64_t stride;  // bytes between rows
  V load(int64_t n, int64_t k) const {
    const std::byte* p = base + n * stride + 2 * k;
    __builtin_prefetch(p + kPrefetchBytes);
    return vload_bf16(p);
  }
  V load_tail(int64_t n, int64_t k, int64_t count) const {
    return vload_bf16_n(base + n * stride + 2 * k, count);
  }
};
struct F32Weights {
  const std::byte* base;
  int64_t stride;
  const float* at(int64_t n, int64_t k) const {
    return reinterpret_cast<const float*>(base + n * stride) + k;
  }
  V load(int64_t n, int64_t k) const { return vload(at(n, k)); }
  V load_tail(int64_t n, int64_t k, int64_t count) const { return vload_n(at(n, k), count); }
};

template <int R, int N, typename W>
inline void dot_block(const GemmArgs& a, const W& w, int64_t row, int64_t n) {
  const float* x[R];
  for (int r = 0; r < R; ++r) {
    x[r] = a.x + (a.x_index ? a.x_index[row + r] : row + r) * a.ldx;
  }
  V acc[R][N];
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < N; ++c) acc[r][c] = vzero();
  }
  int64_t k = 0;
  for (; k + kLanes <= a.k; k += kLanes) {
    V wv[N];
    for (int c = 0; c < N; ++c) wv[c] = w.load(n + c, k);
    for (int r = 0; r < R; ++r) {
      const V xv = vload(x[r] + k);
      for (int c = 0; c < N; ++c) acc[r][c] = vfma(xv, wv[c], acc[r][c]);
    }
  }
  if (const int64_t tail = a.k - k; tail > 0) {
    for (int r = 0; r < R; ++r) {
      const V xv = vload_n(x[r] + k, tail);
      for (int c = 0; c < N; ++c) acc[r][c] = vfma(xv, w.load_tail(n + c, k, tail), acc[r][c]);
    }
  }
  for (int r = 0; r < R; ++r) {
    float* y = a.y + (a.y_index ? a.y_index[row + r] : row + r) * a.ldy;
    for (int c = 0; c < N; ++c) y[n + c - a.y_column] = land(vsum(acc[r][c]), a.land_bf16);
  }
}

#if defined(K3_ISA_AVX512)
inline constexpr int kGemmRows = 4, kGemmCols = 4, kGemvCols = 8;  // 32 registers
#else
inline constexpr int kGemmRows = 3, kGemmCols = 2, kGemvCols = 4;  // 16 registers, two a vector
#endif

template <int R, int N, typename W>
inline void dot_columns(const GemmArgs& a, const W& w, int64_t row) {
  int64_t n = a.n_begin;
  for (; n + N <= a.n_end; n += N) dot_block<R, N>(a, w, row, n);
  for (; n < a.n_end; ++n) dot_block<R, 1>(a, w, row, n);
}

template <typename W>
inline void gemm_rows(const GemmArgs& a, const W& w) {
  int64_t row = 0;
  for (; row + kGemmRows <= a.rows; row += kGemmRows) dot_columns<kGemmRows, kGemmCols>(a, w, row);
  for (; row + 2 <= a.rows; row += 2) dot_columns<2, kGemmCols>(a, w, row);
  for (; row < a.rows; ++row) dot_columns<1, kGemvCols>(a, w, row);
}

inline void gemm_bf16(const GemmArgs& a) { gemm_rows(a, Bf16Weights{a.w, a.w_stride}); }
inline void gemm_f32(const GemmArgs& a) { gemm_rows(a, F32Weights{a.w, a.w_stride}); }

// MXFP4: k is a multiple of 32. One row of x against N weight rows, decoded in registers.
template <int N>
inline void mxfp4_dot(const GemmArgs& a, int64_t row, int64_t n) {
  const float* x = a.x + (a.x_index ? a.x_index[row] : row) * a.ldx;
  float* y = a.y + (a.y_index ? a.y_index[row] : row) * a.ldy;
  const int64_t groups = a.k / kMxfp4Group;
  V acc[N];
  for (int c = 0; c < N; ++c) acc[c] = vzero();
  for (int64_t g = 0; g < groups; ++g) {
    const V x0 = vload(x + g * kMxfp4Group);
    const V x1 = vload(x + g * kMxfp4Group + kLanes);
    for (int c = 0; c < N; ++c) {
      V w0, w1;
      vload_e2m1_doubled(a.w + (n + c) * a.w_stride + g * (kMxfp4Group / 2), &w0, &w1);
      const V half_scale =
          vset(0.5f * e8m0_to_f32(static_cast<uint8_t>(a.scale[(n + c) * groups + g])));
      acc[c] = vfma(x0, vmul(w0, half_scale), acc[c]);
      acc[c] = vfma(x1, vmul(w1, half_scale), acc[c]);
    }
  }
  for (int c = 0; c < N; ++c) y[n + c - a.y_column] = land(vsum(acc[c]), a.land_bf16);
}

inline void mxfp4_decode_row(const std::byte* packed, const std::byte* scale, int64_t k,
                             float* out) {
  for (int64_t g = 0; g < k / kMxfp4Group; ++g) {
    V w0, w1;
    vload_e2m1_doubled(packed + g * (kMxfp4Group / 2), &w0, &w1);
    const V half_scale = vset(0.5f * e8m0_to_f32(static_cast<uint8_t>(scale[g])));
    vstore(out + g * kMxfp4Group, vmul(w0, half_scale));
    vstore(out + g * kMxfp4Group + kLanes, vmul(w1, half_scale));
  }
}

inline void gemm_mxfp4(const GemmArgs& a) {
  const int64_t groups = a.k / kMxfp4Group;
  if (a.rows <= 2) {
    for (int64_t row = 0; row < a.rows; ++row) {
      int64_t n = a.n_begin;
      for (; n + 4 <= a.n_end; n += 4) mxfp4_dot<4>(a, row, n);
      for (; n < a.n_end; ++n) mxfp4_dot<1>(a, row, n);
    }
    return;
  }
  // Several rows share the decoding: a few weight rows go through a scratch that stays in L1/L2.
  for (int64_t n = a.n_begin; n < a.n_end; n += kMxfp4Tile) {
    const int64_t count = n + kMxfp4Tile < a.n_end ? kMxfp4Tile : a.n_end - n;
    for (int64_t c = 0; c < count; ++c) {
      mxfp4_decode_row(a.w + (n + c) * a.w_stride, a.scale + (n + c) * groups, a.k,
                       a.scratch + c * a.k);
    }
    GemmArgs tile = a;
    tile.w = reinterpret_cast<const std::byte*>(a.scratch);
    tile.w_stride = a.k * static_cast<int64_t>(sizeof(float));
    tile.n_begin = 0;
    tile.n_end = count;
    tile.y_column = a.y_column - n;
    gemm_f32(tile);
  }
}

// y[d] = sum_n x[n] * w[n, d]: the transposed product, n in ascending order (MLA's absorbed query).
template <int R>
inline void gemm_t_block(const GemmArgs& a, int64_t row) {
  const float* x[R];
  float* y[R];
  for (int r = 0; r < R; ++r) {
    x[r] = a.x + (row + r) * a.ldx;
    y[r] = a.y + (row + r) * a.ldy;
  }
  const int64_t d_count = a.k;
  for (int64_t d = 0; d < d_count; d += kLanes) {
    const int64_t count = d_count - d < kLanes ? d_count - d : kLanes;
    V acc[R];
    for (int r = 0; r < R; ++r) acc[r] = vzero();
    for (int64_t n = a.n_begin; n < a.n_end; ++n) {
      const V w = vload_bf16_n(a.w + n * a.w_stride + 2 * d, count);
      for (int r = 0; r < R; ++r) acc[r] = vfma(vset(x[r][n - a.n_begin]), w, acc[r]);
    }
    for (int r = 0; r < R; ++r) vstore_n(y[r] + d, vland(acc[r], a.land_bf16), count);
  }
}
inline void gemm_bf16_t(const GemmArgs& a) {
  int64_t row = 0;
  for (; row + 4 <= a.rows; row += 4) gemm_t_block<4>(a, row);
  for (; row < a.rows; ++row) gemm_t_block<1>(a, row);
}

}  // namespace k3::K3_ISA_NS
