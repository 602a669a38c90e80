// Latent attention on the card, absorbed form: queries are folded through W_UK, so scores and sums
// read the paged latents as they lie (576 wide at the release's dimensions).
//
// The order of sums is the contract: the context is cut into spans of 256 tokens of absolute
// position; within a span scores, maximum and exponentials stand alone and the weighted sum is one
// chain in ascending tokens; spans are merged in order:
//   M = max(m, m_s); a = exp(m - M); b = exp(m_s - M); l = l a + l_s b; o = o a + o_s b.
// Whether spans are computed by different blocks and merged by a second launch (decode) or walked
// by one block (prefill) changes no bit.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/status.h"
#include "cuda/device.h"
#include "cuda/step_view.h"

namespace k3::cuda {

inline constexpr int kSpanTokens = 256;

// q_a = RMSNorm(q_a) in place; latent = [RMSNorm(latent[0:rank]) | latent[rank:]] joins its page.
struct MlaPrepare {
  int32_t rows = 0;
  bf16* q_a = nullptr;  // [rows][q_lora_rank]
  const float* q_gain = nullptr;
  int32_t q_lora_rank = 0;
  const bf16* latent = nullptr;  // [rows][latent_dim] as projected
  const float* kv_gain = nullptr;
  int32_t kv_lora_rank = 0, latent_dim = 0;
  float eps = 0;
  bf16* cache = nullptr;  // this layer's rows of page p at cache + p * page_stride (elements)
  int64_t page_stride = 0;
};
Status run_mla_prepare(const MlaPrepare& prepare, const StepView& step, cudaStream_t stream);

struct MlaAttend {
  int32_t rows = 0, heads = 0;
  // The absorbed query, two bf16 planes whose sum is the float32 value:
  // [rows][heads][kv_lora_rank].
  const bf16 *q_hi = nullptr, *q_lo = nullptr;
  // q as projected, [rows][heads][nope + rope]: its last `rope` columns score the latent's tail.
  const bf16* q = nullptr;
  int32_t nope = 0, rope = 0, kv_lora_rank = 0;
  float scale = 0;
  const bf16* cache = nullptr;
  int64_t page_stride = 0;
  // Split form (counts[kSplitAttention] == 1): partials of (row, span) item i, rows in order, spans
  // in order within one: sums [i][heads][kv_lora_rank], max and total [i][heads][2].
  float* partial_sums = nullptr;
  float* partial_stats = nullptr;
  // Sum of latents over the softmax, as two planes: [rows][heads][kv_lora_rank].
  bf16 *out_hi = nullptr, *out_lo = nullptr;
  int32_t num_blocks = 0;  // of the persistent launch
};
// Two launches: attend, and merge (which does nothing when the step walks).
Status run_mla_attend(const MlaAttend& attend, const StepView& step, cudaStream_t stream);

}  // namespace k3::cuda
