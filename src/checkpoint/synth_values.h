// The elements of synthetic checkpoints as pure functions of (seed, tensor name, element index):
// integer hashing and single correctly rounded float32 operations, no libm, so that any device
// computes the same bytes. Host and device neutral; the fast host loop is in synth.cc.
#pragma once

#include <cstdint>
#include <string_view>

#include "core/dtype.h"

#if defined(__CUDACC__)
#define K3_HOST_DEVICE __host__ __device__
#else
#define K3_HOST_DEVICE
#endif

namespace k3 {

enum class SynthKind : uint8_t {
  kUniform,     // center + half_width * u, u uniform in (-1, 1)
  kTriangular,  // center + half_width * (u + v) / 2
  kCodes,       // MXFP4 code bytes, all 16 codes alike
  kScales,      // E8M0 bytes from scale_base - 2 to scale_base + 1
};

// How one tensor is filled. Plain data: fit to be passed to a kernel by value.
struct SynthTensor {
  SynthKind kind = SynthKind::kUniform;
  DType dtype = DType::kBF16;
  uint64_t key = 0;             // synth_key(seed, name)
  int64_t live = 0;             // elements from here on are exactly zero
  float center = 0;             // kUniform, kTriangular
  float half_width = 0;         // kUniform, kTriangular
  int32_t scale_base = 0;       // kScales
  int32_t scale_threshold = 0;  // kScales: hash bytes below it (and from 64 on) give scale_base
};

// The finaliser of SplitMix64 (Steele, Lea, Flood 2014) as a hash.
K3_HOST_DEVICE constexpr uint64_t synth_mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}
K3_HOST_DEVICE constexpr uint64_t synth_hash(uint64_t key, uint64_t index) {
  return synth_mix(key + (index + 1) * 0x9e3779b97f4a7c15ull);
}

// FNV-1a of the canonical name, mixed with the seed.
constexpr uint64_t synth_key(uint64_t seed, std::string_view canonical_name) {
  uint64_t h = 0xcbf29ce484222325ull;
  for (const char c : canonical_name) {
    h = (h ^ static_cast<unsigned char>(c)) * 0x100000001b3ull;
  }
  return synth_mix(synth_mix(seed) ^ h);
}

// Never fused into an fma, whatever the compiler's flags on the device.
K3_HOST_DEVICE inline float synth_mul(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}
K3_HOST_DEVICE inline float synth_add(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

// 16 hash bits to an odd multiple of 2^-16 in (-1, 1): exact, and symmetric about zero.
K3_HOST_DEVICE inline float synth_unit(uint32_t bits16) {
  return synth_mul(static_cast<float>(2 * static_cast<int32_t>(bits16) - 65535), 0x1p-16f);
}

// A hash holds four 16-bit lanes; element i takes lane i % 4 of hash i / 4.
K3_HOST_DEVICE inline uint32_t synth_lane(uint64_t hash, uint64_t index) {
  return static_cast<uint32_t>(hash >> (16 * (index & 3))) & 0xffffu;
}

// What the second draw of kTriangular hashes with.
inline constexpr uint64_t kSynthSecondDraw = 0x5851f42d4c957f2dull;

// Float kinds, before rounding to the tensor's dtype; `first` and `second` are the hashes of
// index / 4 under key and key ^ kSynthSecondDraw (`second` is used by kTriangular only).
K3_HOST_DEVICE inline float synth_value(const SynthTensor& t, uint64_t index, uint64_t first,
                                        uint64_t second) {
  float u = synth_unit(synth_lane(first, index));
  if (t.kind == SynthKind::kTriangular) {
    u = synth_mul(synth_add(u, synth_unit(synth_lane(second, index))), 0.5f);
  }
  return synth_add(t.center, synth_mul(t.half_width, u));
}

// Element `index` of a BF16 or F32 tensor, before rounding to the dtype.
K3_HOST_DEVICE inline float synth_float(const SynthTensor& t, int64_t index) {
  if (index >= t.live) return 0.0f;
  const auto i = static_cast<uint64_t>(index);
  return synth_value(
      t, i, synth_hash(t.key, i >> 2),
      t.kind == SynthKind::kTriangular ? synth_hash(t.key ^ kSynthSecondDraw, i >> 2) : 0);
}

// One byte of kCodes or kScales from its eight hash bits.
K3_HOST_DEVICE inline uint8_t synth_byte_from(const SynthTensor& t, uint32_t bits8) {
  if (t.kind == SynthKind::kCodes) return static_cast<uint8_t>(bits8);
  const int32_t r = static_cast<int32_t>(bits8);
  const int32_t step = r < 32 ? -2 : r < 64 ? -1 : r < t.scale_threshold ? 0 : 1;
  return static_cast<uint8_t>(t.scale_base + step);
}

// Byte `index` of a U8 tensor: a hash holds eight of them.
K3_HOST_DEVICE inline uint8_t synth_byte(const SynthTensor& t, int64_t index) {
  const auto i = static_cast<uint64_t>(index);
  const uint64_t hash = synth_hash(t.key, i >> 3);
  return synth_byte_from(t, static_cast<uint32_t>(hash >> (8 * (i & 7))) & 0xffu);
}

}  // namespace k3
