// The number formats of a K3 checkpoint. Every conversion here is exact or round-to-nearest-even
// and table-tested; nothing in this file knows of the model.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace k3 {

enum class DType { kBF16, kF32, kU8 };

constexpr size_t dtype_bytes(DType t) { return t == DType::kBF16 ? 2 : t == DType::kF32 ? 4 : 1; }
// The name safetensors headers use.
constexpr const char* dtype_name(DType t) {
  return t == DType::kBF16 ? "BF16" : t == DType::kF32 ? "F32" : "U8";
}

inline float f32_from_bits(uint32_t bits) {
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
inline uint32_t f32_bits(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  return bits;
}

// bf16 is stored as uint16_t: the high half of a float32.
inline float bf16_to_f32(uint16_t b) { return f32_from_bits(static_cast<uint32_t>(b) << 16); }

// Round to nearest, ties to even. NaN stays NaN (quietened), infinities stay, overflow goes to
// infinity as IEEE says.
inline uint16_t f32_to_bf16(float f) {
  uint32_t b = f32_bits(f);
  if ((b & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((b >> 16) | 0x0040u);
  b += 0x7fffu + ((b >> 16) & 1u);
  return static_cast<uint16_t>(b >> 16);
}
inline float round_to_bf16(float f) { return bf16_to_f32(f32_to_bf16(f)); }

// MXFP4 (OCP microscaling): E2M1 codes, 32 of them along K sharing one E8M0 scale.
// Byte b of a row holds element 2b in its low nibble and 2b+1 in its high nibble.
inline constexpr int kMxfp4Group = 32;
inline constexpr float kE2m1[16] = {0.f,  0.5f,  1.f,  1.5f,  2.f,  3.f,  4.f,  6.f,
                                    -0.f, -0.5f, -1.f, -1.5f, -2.f, -3.f, -4.f, -6.f};

// 2^(s-127); s = 255 is NaN by the standard. s = 0 is 2^-127, a float32 subnormal.
inline float e8m0_to_f32(uint8_t s) {
  if (s == 255) return f32_from_bits(0x7fc00000u);
  if (s == 0) return f32_from_bits(0x00400000u);
  return f32_from_bits(static_cast<uint32_t>(s) << 23);
}

}  // namespace k3
