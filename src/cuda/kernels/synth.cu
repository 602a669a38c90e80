#include "cuda/kernels/synth.h"

#include <algorithm>

#include "cuda/device.h"
#include "cuda/launch.h"

namespace k3::cuda {
namespace {

// Eight bytes a thread a turn: four bf16, two float32, or eight codes or scales.
__device__ uint64_t synth_word(const SynthTensor& t, int64_t first) {
  if (t.dtype == DType::kU8) {
    const auto i = static_cast<uint64_t>(first);
    const uint64_t hash = synth_hash(t.key, i >> 3);
    uint64_t word = 0;
    for (int j = 0; j < 8; ++j) {
      const uint8_t byte = synth_byte_from(t, static_cast<uint32_t>(hash >> (8 * j)) & 0xffu);
      word |= static_cast<uint64_t>(byte) << (8 * j);
    }
    return word;
  }
  if (t.dtype == DType::kF32) {
    const uint64_t low = __float_as_uint(synth_float(t, first / 4));
    const uint64_t high = __float_as_uint(synth_float(t, first / 4 + 1));
    return high << 32 | low;
  }
  const int64_t at = first / 2;
  const auto i = static_cast<uint64_t>(at);
  const uint64_t one = synth_hash(t.key, i >> 2);
  const uint64_t two =
      t.kind == SynthKind::kTriangular ? synth_hash(t.key ^ kSynthSecondDraw, i >> 2) : 0;
  uint64_t word = 0;
  for (int j = 0; j < 4; ++j) {
    const float v = at + j < t.live ? synth_value(t, i + static_cast<uint64_t>(j), one, two) : 0.f;
    word |= static_cast<uint64_t>(land(v)) << (16 * j);
  }
  return word;
}

__global__ void __launch_bounds__(256)
    fill_kernel(SynthTensor tensor, int64_t first, int64_t bytes, unsigned char* out) {
  wait_for_inputs();
  let_next_start();
  const int64_t words = (bytes + 7) / 8, stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t w = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; w < words;
       w += stride) {
    const uint64_t word = synth_word(tensor, first + 8 * w);
    if (8 * w + 8 <= bytes) {
      *reinterpret_cast<uint64_t*>(out + 8 * w) = word;
    } else {
      for (int64_t b = 8 * w; b < bytes; ++b) {
        out[b] = static_cast<unsigned char>(word >> (8 * (b - 8 * w)));
      }
    }
  }
}

}  // namespace

Status fill_synthetic(const SynthTensor& tensor, int64_t first, int64_t bytes, std::byte* out,
                      cudaStream_t stream) {
  const int64_t blocks = std::clamp<int64_t>((bytes / 8 + 255) / 256, 1, 4096);
  return launch("fill_synthetic", fill_kernel, {dim3(static_cast<unsigned>(blocks)), dim3(256)},
                stream, tensor, first, bytes, reinterpret_cast<unsigned char*>(out));
}

}  // namespace k3::cuda
