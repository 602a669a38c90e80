// What happens to the stream between layers: embedding, residual adds, attention-residual mixes and
// their RMSNorm; and the router.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/status.h"
#include "cuda/device.h"
#include "cuda/step_view.h"

namespace k3::cuda {

// stream[row] = table[token[row]] for live rows, zero for padding rows.
Status run_embed(const StepView& step, const bf16* table, int64_t hidden, int32_t rows,
                 bf16* stream_out, cudaStream_t stream);

inline constexpr int kMaxCandidates = 9;  // 8 snapshots and the stream

// One launch a row: x = stream (+ delta | := delta), landed and written back; candidates are `bank`
// snapshots, oldest first, then x:
//   score_i = rsqrt(mean(v_i^2) + eps) * sum_d v_i[d] fold[d];  mix = land(sum_i softmax(score)_i
//   v_i) out = land(land(mix * rsqrt(mean(mix^2) + eps)) * gain)
// With an empty bank mix = x.
struct Mix {
  bf16* stream = nullptr;       // [rows][hidden]
  const bf16* delta = nullptr;  // null: none
  bool replace = false;         // x = delta; the old stream lives on in its snapshot alone
  bf16* snapshots = nullptr;    // snapshot s of row r at s * snapshot_stride + r * hidden
  int64_t snapshot_stride = 0;
  int32_t bank = 0;             // candidates besides x
  int32_t write_snapshot = -1;  // x is also stored as this snapshot
  const float* fold = nullptr;  // [hidden]
  const float* gain = nullptr;  // [hidden]
  float eps = 0;
  int64_t hidden = 0;
  int32_t rows = 0;                    // of out
  const int32_t* row_index = nullptr;  // out row i is stream row row_index[i] (the head); then x is
                                       // not written back. Null: row i
  const int32_t* num_rows = nullptr;   // device: rows of row_index that count; others give zeros
  bf16* out = nullptr;                 // [rows][hidden]
};
Status run_mix(const Mix& mix, cudaStream_t stream);

// sigma = sigmoid(logits); the top_k of sigma + bias, ties to the lower id, in descending order;
// weights sigma / (sum + 1e-20) * scaling, summed in the order of choice. Padding rows get ids -1
// and weights 0. At most 1024 experts.
struct Router {
  const float* logits = nullptr;  // [rows][num_experts]
  const float* bias = nullptr;    // [num_experts]
  int32_t num_experts = 0, top_k = 0, rows = 0;
  float scaling = 1;
  const int32_t* live_rows = nullptr;  // device
  int32_t* ids = nullptr;              // [rows][top_k]
  float* weights = nullptr;            // [rows][top_k]
};
Status run_router(const Router& router, cudaStream_t stream);

}  // namespace k3::cuda
