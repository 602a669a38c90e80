// Kimi Delta Attention on the card: short convolution, SiLU, L2 norm, gated delta rule, output norm
// and gate, the token recurrence (docs/model.md). State and window are updated in place; a block
// holds one head's state of one segment in registers over all its tokens.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/status.h"
#include "cuda/device.h"
#include "cuda/step_view.h"

namespace k3::cuda {

// D = head_dim (a multiple of 32, at most 128), dim = heads * D. Rows of a segment are consecutive.
struct Kda {
  int32_t segments = 0;  // the grid; those past counts[kSegments] do nothing
  int32_t heads = 0, head_dim = 0, conv_width = 0;
  const bf16* qkv = nullptr;    // [rows][3 dim]: q, k, v as projected
  const bf16* gate = nullptr;   // [rows][dim]
  const bf16* decay = nullptr;  // [rows][dim]: f_b
  const bf16* beta = nullptr;   // [rows][beta_ld]
  int64_t beta_ld = 0;
  const float *q_conv = nullptr, *k_conv = nullptr, *v_conv = nullptr;  // [conv_width][dim]
  const float* dt_bias = nullptr;                                       // [dim]
  const float* exp_a = nullptr;                                         // [heads]
  const float* o_norm = nullptr;                                        // [D]
  float gate_lower_bound = 0, rms_eps = 0, l2_eps = 0;
  // This layer's part of slot s: state + s * state_per_slot, window + s * window_per_slot (floats);
  // within it [head][v][k] and [head][q,k,v][age][D].
  float* state = nullptr;
  float* window = nullptr;
  int64_t state_per_slot = 0, window_per_slot = 0;
  bf16* out = nullptr;  // [rows][dim]
};
Status run_kda(const Kda& kda, const StepView& step, cudaStream_t stream);

}  // namespace k3::cuda
