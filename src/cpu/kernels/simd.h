// Sixteen float32 lanes, whatever the machine. Included once per ISA (isa_*.cc) with K3_ISA_AVX512,
// K3_ISA_AVX2 or neither defined, inside that ISA's namespace K3_ISA_NS.
//
// The three forms give the same bits: the lane an element falls into, the order of its additions
// and the fused multiply-adds are part of the definition, not of the instruction set.
// -ffp-contract=off keeps the compiler from fusing anything else.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(K3_ISA_AVX512) || defined(K3_ISA_AVX2)
#include <immintrin.h>
#endif

#include "core/dtype.h"

namespace k3::K3_ISA_NS {

inline constexpr int kLanes = 16;

#if defined(K3_ISA_AVX512)

struct V {
  __m512 v;
};
inline V vset(float x) { return {_mm512_set1_ps(x)}; }
inline V vload(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void vstore(float* p, V a) { _mm512_storeu_ps(p, a.v); }
inline V vadd(V a, V b) { return {_mm512_add_ps(a.v, b.v)}; }
inline V vsub(V a, V b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline V vmul(V a, V b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline V vdiv(V a, V b) { return {_mm512_div_ps(a.v, b.v)}; }
inline V vfma(V a, V b, V c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline V vmax(V a, V b) { return {_mm512_max_ps(a.v, b.v)}; }
inline V vmin(V a, V b) { return {_mm512_min_ps(a.v, b.v)}; }
inline V vround(V a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline V vpow2i(V n) {
  const __m512i i = _mm512_cvtps_epi32(n.v);
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(i, _mm512_set1_epi32(127)), 23))};
}
inline V vload_bf16(const std::byte* p) {
  const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))};
}
inline V vround_bf16(V a) {
  const __m512i b = _mm512_castps_si512(a.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(b, 16), _mm512_set1_epi32(1));
  const __m512i r =
      _mm512_and_si512(_mm512_add_epi32(_mm512_add_epi32(b, _mm512_set1_epi32(0x7fff)), odd),
                       _mm512_set1_epi32(static_cast<int>(0xffff0000u)));
  const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  return {_mm512_mask_blend_ps(nan, _mm512_castsi512_ps(r), a.v)};
}
inline __m256 low_half(V a) { return _mm512_castps512_ps256(a.v); }
inline __m256 high_half(V a) {
  return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.v), 1));
}
inline V widen_int8(__m128i codes) { return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes))}; }

#elif defined(K3_ISA_AVX2)

struct V {
  __m256 a, b;
};
inline V vset(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline V vload(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void vstore(float* p, V x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
inline V vadd(V x, V y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline V vsub(V x, V y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline V vmul(V x, V y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline V vdiv(V x, V y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline V vfma(V x, V y, V z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
inline V vmax(V x, V y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline V vmin(V x, V y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline V vround(V x) {
  constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, kMode), _mm256_round_ps(x.b, kMode)};
}
inline __m256 pow2i_half(__m256 n) {
  const __m256i i = _mm256_cvtps_epi32(n);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(i, _mm256_set1_epi32(127)), 23));
}
inline V vpow2i(V n) { return {pow2i_half(n.a), pow2i_half(n.b)}; }
inline V vload_bf16(const std::byte* p) {
  const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i lo = _mm256_cvtepu16_epi32(_mm256_castsi256_si128(h));
  const __m256i hi = _mm256_cvtepu16_epi32(_mm256_extracti128_si256(h, 1));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(lo, 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(hi, 16))};
}
inline __m256 round_bf16_half(__m256 x) {
  const __m256i b = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(b, 16), _mm256_set1_epi32(1));
  const __m256i r =
      _mm256_and_si256(_mm256_add_epi32(_mm256_add_epi32(b, _mm256_set1_epi32(0x7fff)), odd),
                       _mm256_set1_epi32(static_cast<int>(0xffff0000u)));
  return _mm256_blendv_ps(_mm256_castsi256_ps(r), x, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}
inline V vround_bf16(V x) { return {round_bf16_half(x.a), round_bf16_half(x.b)}; }
inline __m256 low_half(V x) { return x.a; }
inline __m256 high_half(V x) { return x.b; }
inline V widen_int8(__m128i codes) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes)),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(codes, 8)))};
}

#else  // portable: sixteen scalars; std::fma is exact everywhere and one instruction where there is
       // one

struct V {
  float l[kLanes];
};
#define K3_LANEWISE(expr)                         \
  V r;                                            \
  for (int i = 0; i < kLanes; ++i) r.l[i] = expr; \
  return r
inline V vset(float x) { K3_LANEWISE(x); }
inline V vload(const float* p) {
  V r;
  std::memcpy(r.l, p, sizeof(r.l));
  return r;
}
inline void vstore(float* p, const V& x) { std::memcpy(p, x.l, sizeof(x.l)); }
inline V vadd(const V& x, const V& y) { K3_LANEWISE(x.l[i] + y.l[i]); }
inline V vsub(const V& x, const V& y) { K3_LANEWISE(x.l[i] - y.l[i]); }
inline V vmul(const V& x, const V& y) { K3_LANEWISE(x.l[i] * y.l[i]); }
inline V vdiv(const V& x, const V& y) { K3_LANEWISE(x.l[i] / y.l[i]); }
inline V vfma(const V& x, const V& y, const V& z) { K3_LANEWISE(std::fma(x.l[i], y.l[i], z.l[i])); }
inline V vmax(const V& x, const V& y) { K3_LANEWISE((x.l[i] > y.l[i] ? x.l[i] : y.l[i])); }
inline V vmin(const V& x, const V& y) { K3_LANEWISE((x.l[i] < y.l[i] ? x.l[i] : y.l[i])); }
inline V vround(const V& x) { K3_LANEWISE(std::nearbyint(x.l[i])); }
// NaN has no integer value (the cast would be undefined): any power serves, the product is NaN.
inline V vpow2i(const V& n) {
  K3_LANEWISE(std::isnan(n.l[i])
                  ? 1.f
                  : f32_from_bits(static_cast<uint32_t>(static_cast<int32_t>(n.l[i]) + 127) << 23));
}
inline V vload_bf16(const std::byte* p) {
  uint16_t h[kLanes];
  std::memcpy(h, p, sizeof(h));
  K3_LANEWISE(bf16_to_f32(h[i]));
}
inline V vround_bf16(const V& x) {
  K3_LANEWISE((std::isnan(x.l[i]) ? x.l[i] : round_to_bf16(x.l[i])));
}
#undef K3_LANEWISE

#endif

inline V vzero() { return vset(0.f); }

// The first n lanes (0 < n <= 16), zeros after them.
inline V vload_n(const float* p, int64_t n) {
  if (n >= kLanes) return vload(p);
  float t[kLanes] = {};
  std::memcpy(t, p, static_cast<size_t>(n) * sizeof(float));
  return vload(t);
}
inline void vstore_n(float* p, V a, int64_t n) {
  if (n >= kLanes) {
    vstore(p, a);
    return;
  }
  float t[kLanes];
  vstore(t, a);
  std::memcpy(p, t, static_cast<size_t>(n) * sizeof(float));
}
inline V vload_bf16_n(const std::byte* p, int64_t n) {
  if (n >= kLanes) return vload_bf16(p);
  std::byte t[2 * kLanes] = {};
  std::memcpy(t, p, static_cast<size_t>(n) * 2);
  return vload_bf16(t);
}

// The lanes added pairwise in a fixed tree: i with i+8, then +4, +2, +1.
inline float vsum(V x) {
#if defined(K3_ISA_AVX512) || defined(K3_ISA_AVX2)
  const __m256 s8 = _mm256_add_ps(low_half(x), high_half(x));
  const __m128 s4 = _mm_add_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
  const __m128 s2 = _mm_add_ps(s4, _mm_movehl_ps(s4, s4));
  return _mm_cvtss_f32(_mm_add_ss(s2, _mm_shuffle_ps(s2, s2, 1)));
#else
  float s[8];
  for (int i = 0; i < 8; ++i) s[i] = x.l[i] + x.l[i + 8];
  for (int i = 0; i < 4; ++i) s[i] += s[i + 4];
  return (s[0] + s[2]) + (s[1] + s[3]);
#endif
}
inline float vfirst(V x) {
  float t[kLanes];
  vstore(t, x);
  return t[0];
}

// One MXFP4 group (16 bytes): elements 0..15 and 16..31 as twice their E2M1 values, so multiply by
// half the scale. Doubling makes the codes integers; powers of two keep all of it exact.
inline void vload_e2m1_doubled(const std::byte* p, V* first, V* second) {
#if defined(K3_ISA_AVX512) || defined(K3_ISA_AVX2)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  const __m128i mask = _mm_set1_epi8(0x0f);
  const __m128i lo = _mm_and_si128(bytes, mask);
  const __m128i hi = _mm_and_si128(_mm_srli_epi16(bytes, 4), mask);
  const __m128i table = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
  *first = widen_int8(_mm_shuffle_epi8(table, _mm_unpacklo_epi8(lo, hi)));
  *second = widen_int8(_mm_shuffle_epi8(table, _mm_unpackhi_epi8(lo, hi)));
#else
  for (int i = 0; i < 8; ++i) {
    const auto a = static_cast<uint8_t>(p[i]);
    const auto b = static_cast<uint8_t>(p[i + 8]);
    first->l[2 * i] = 2.f * kE2m1[a & 15];
    first->l[2 * i + 1] = 2.f * kE2m1[a >> 4];
    second->l[2 * i] = 2.f * kE2m1[b & 15];
    second->l[2 * i + 1] = 2.f * kE2m1[b >> 4];
  }
#endif
}

}  // namespace k3::K3_ISA_NS
