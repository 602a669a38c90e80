// Absorbed latent attention over the paged cache. Included per ISA.
#pragma once

#include "cpu/kernels/gemm.h"
#include "executor/executor.h"

namespace k3::K3_ISA_NS {

// acc[h][:] += sum_t p[h][t] * cache[t][:], tokens in order; H heads share each load.
template <int H, typename W>
inline void weighted_latents(const W& page, const float (*p)[kPageTokens], int64_t tokens,
                             int64_t rank, float* acc) {
  for (int64_t d = 0; d < rank; d += kLanes) {
    const int64_t c = rank - d < kLanes ? rank - d : kLanes;
    V sum[H];
    for (int h = 0; h < H; ++h) sum[h] = vload_n(acc + h * rank + d, c);
    for (int64_t t = 0; t < tokens; ++t) {
      const V latent = page.load_tail(t, d, c);
      for (int h = 0; h < H; ++h) sum[h] = vfma(vset(p[h][t]), latent, sum[h]);
    }
    for (int h = 0; h < H; ++h) vstore_n(acc + h * rank + d, sum[h], c);
  }
}

template <int H, typename W>
inline void mla_attend_heads(const MlaAttendArgs& a) {
  const int64_t row_bytes = a.latent_dim * (a.cache_bf16 ? 2 : 4);
  float p[H][kPageTokens];
  float top[H] = {}, sum[H] = {};
  for (int64_t first = 0; first < a.context; first += kPageTokens) {
    const int64_t tokens = a.context - first < kPageTokens ? a.context - first : kPageTokens;
    const std::byte* base = a.cache + a.pages[first / kPageTokens] * a.page_stride;
    GemmArgs scores;
    scores.x = a.q;
    scores.ldx = a.latent_dim;
    scores.rows = H;
    scores.k = a.latent_dim;
    scores.w = base;
    scores.w_stride = row_bytes;
    scores.n_end = tokens;
    scores.y = &p[0][0];
    scores.ldy = kPageTokens;
    a.cache_bf16 ? gemm_bf16(scores) : gemm_f32(scores);
    for (int h = 0; h < H; ++h) {
      float page_top = p[h][0] * a.scale;
      for (int64_t t = 0; t < tokens; ++t) {
        p[h][t] *= a.scale;
        page_top = p[h][t] > page_top ? p[h][t] : page_top;
      }
      float* acc = a.out + h * a.kv_lora_rank;
      const float new_top = first == 0 || page_top > top[h] ? page_top : top[h];
      if (first == 0) {
        std::memset(acc, 0, static_cast<size_t>(a.kv_lora_rank) * sizeof(float));
        sum[h] = 0;
      } else if (new_top != top[h]) {
        const float shrink = vfirst(vexp(vset(top[h] - new_top)));
        sum[h] *= shrink;
        for (int64_t d = 0; d < a.kv_lora_rank; d += kLanes) {
          const int64_t c = a.kv_lora_rank - d < kLanes ? a.kv_lora_rank - d : kLanes;
          vstore_n(acc + d, vmul(vload_n(acc + d, c), vset(shrink)), c);
        }
      }
      top[h] = new_top;
      V page_sum = vzero();
      for (int64_t t = 0; t < tokens; t += kLanes) {
        const int64_t c = tokens - t < kLanes ? tokens - t : kLanes;
        const V e = vexp(vsub(vload_n(&p[h][t], c), vset(new_top)));
        vstore_n(&p[h][t], e, c);
        page_sum = vadd(page_sum, vload_n(&p[h][t], c));  // reloaded: lanes past the end are zero
      }
      sum[h] += vsum(page_sum);
    }
    weighted_latents<H>(W{base, row_bytes}, p, tokens, a.kv_lora_rank, a.out);
  }
  for (int h = 0; h < H; ++h) {
    float* acc = a.out + h * a.kv_lora_rank;
    for (int64_t d = 0; d < a.kv_lora_rank; d += kLanes) {
      const int64_t c = a.kv_lora_rank - d < kLanes ? a.kv_lora_rank - d : kLanes;
      vstore_n(acc + d, vdiv(vload_n(acc + d, c), vset(sum[h])), c);
    }
  }
}

template <typename W>
inline void mla_attend_dispatch(const MlaAttendArgs& a) {
  switch (a.heads) {
    case 1:
      return mla_attend_heads<1, W>(a);
    case 2:
      return mla_attend_heads<2, W>(a);
    case 3:
      return mla_attend_heads<3, W>(a);
    default:
      return mla_attend_heads<kMlaHeadBlock, W>(a);
  }
}

// heads <= kMlaHeadBlock
inline void mla_attend(const MlaAttendArgs& a) {
  a.cache_bf16 ? mla_attend_dispatch<Bf16Weights>(a) : mla_attend_dispatch<F32Weights>(a);
}

}  // namespace k3::K3_ISA_NS
