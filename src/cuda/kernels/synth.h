// Synthetic weights made on the card by recipe: the bytes of checkpoint/synth.h.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "checkpoint/synth_values.h"
#include "core/status.h"

namespace k3::cuda {

// Bytes [first, first + bytes) of the tensor to `out` (device, 8-byte aligned); `first` is a
// multiple of 8.
Status fill_synthetic(const SynthTensor& tensor, int64_t first, int64_t bytes, std::byte* out,
                      cudaStream_t stream);

}  // namespace k3::cuda
