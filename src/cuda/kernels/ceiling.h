// What the card's memory gives: the yardstick of `k3 bench`.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/status.h"

namespace k3::cuda {

// Reads `bytes` (a multiple of 16) once; `sink` (device) is written only if they sum to a value
// they do not have, so that no compiler drops the reads.
Status run_read(const void* data, int64_t bytes, int num_blocks, int threads, uint32_t* sink,
                cudaStream_t stream);

}  // namespace k3::cuda
