// Launching a kernel: every launch carries the attribute that lets it start while its predecessor
// drains (programmatic dependent launch; the kernel's side is wait_for_inputs() in device.h), and
// every CUDA error becomes a Status that names the call.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <utility>

#include "core/status.h"

namespace k3::cuda {

// kDevice, "WHAT: cudaErrorX: text"; kMemory for an allocation that does not fit.
Status cuda_error(const char* what, cudaError_t error);
inline Status cuda_check(const char* what, cudaError_t error) {
  return error == cudaSuccess ? Status() : cuda_error(what, error);
}

struct Grid {
  dim3 blocks;
  dim3 threads;
  size_t shared_bytes = 0;  // dynamic
};

// Asks once for the dynamic shared memory that `kernel` may be launched with beyond 48 KiB.
template <typename... P>
Status allow_shared(const char* name, void (*kernel)(P...), size_t bytes) {
  return cuda_check(name, cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                               cudaFuncAttributeMaxDynamicSharedMemorySize,
                                               static_cast<int>(bytes)));
}

template <typename... P, typename... A>
Status launch(const char* name, void (*kernel)(P...), const Grid& grid, cudaStream_t stream,
              A&&... args) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid.blocks;
  config.blockDim = grid.threads;
  config.dynamicSmemBytes = grid.shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cuda_check(name,
                    cudaLaunchKernelEx(&config, kernel, static_cast<P>(std::forward<A>(args))...));
}

}  // namespace k3::cuda
