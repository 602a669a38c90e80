// Random numbers by counter: the draw for a token is a function of (seed, token index) alone, so a
// seeded request is reproducible whatever runs beside it, and no generator state has to be kept.
// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
#pragma once

#include <array>
#include <cstdint>

namespace k3 {

using PhiloxBlock = std::array<uint32_t, 4>;

constexpr PhiloxBlock philox4x32(PhiloxBlock counter, std::array<uint32_t, 2> key) {
  constexpr uint64_t kMul0 = 0xD2511F53, kMul1 = 0xCD9E8D57;
  constexpr uint32_t kWeyl0 = 0x9E3779B9, kWeyl1 = 0xBB67AE85;
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = kMul0 * counter[0];
    const uint64_t p1 = kMul1 * counter[2];
    counter = {static_cast<uint32_t>(p1 >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(p1),
               static_cast<uint32_t>(p0 >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(p0)};
    key[0] += kWeyl0;
    key[1] += kWeyl1;
  }
  return counter;
}

// 64 random bits for (seed, index).
constexpr uint64_t counter_bits(uint64_t seed, uint64_t index) {
  const PhiloxBlock block =
      philox4x32({static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32), 0, 0},
                 {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
  return (static_cast<uint64_t>(block[1]) << 32) | block[0];
}

// Uniform in [0, 1), 53 bits.
constexpr double counter_uniform(uint64_t seed, uint64_t index) {
  return static_cast<double>(counter_bits(seed, index) >> 11) * 0x1p-53;
}

}  // namespace k3
