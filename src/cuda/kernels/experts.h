// The routed experts of one layer on one rank as a chain of launches: routes, W13 with situ, W2,
// combine with the latent RMSNorm. Production at world 1 today, and the oracle of the fused kernel.
//
// W4A16: MXFP4 codes are decoded in registers to bf16 (exact) and are the A operand of mma.sync
// m16n8k16. The order of a sum is the contract: K in blocks of 64, blocks cut into 4 contiguous
// slices ([i B / 4, (i + 1) B / 4)), each one chain of mma steps in ascending K, slices added in
// order. gate and up land, situ of them in float32 lands, y_e lands; the combine adds w_e * y_e in
// slot order by fused multiply-adds and lands once (docs/numerics.md).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/status.h"
#include "cuda/device.h"

namespace k3::cuda {

// The largest E8M0 block scale this decoding holds: 2^(128 - 127).
inline constexpr int kMaxScaleByte = 128;

// One layer's experts, expert-major. w13: rows of w1 and w3 interleaved 8 and 8 in each tile of 16;
// w2: rows as they are. Layout of a matrix: see experts.cu.
struct ExpertBank {
  const std::byte* w13 = nullptr;
  const std::byte* w2 = nullptr;
  int32_t num_experts = 0;  // local
  int32_t latent = 0;       // routed_expert_hidden_size
  int32_t inter = 0;        // moe_intermediate_size
};
// Bytes of one expert's w13 and w2 in the bank (codes and scales).
int64_t expert_w13_bytes(int64_t latent, int64_t inter);
int64_t expert_w2_bytes(int64_t latent, int64_t inter);

// Packs one expert from raw checkpoint bytes in device memory: codes [n][k/2], scales [n][k/32].
// `bad_scale` (device, preset to -1) receives, by atomicMax, 256 * index + value of a scale byte
// above kMaxScaleByte, which this decoding cannot hold; which matrix is the caller's to know.
struct RawExpertMatrix {
  const std::byte* codes = nullptr;
  const std::byte* scales = nullptr;
};
Status pack_expert_w13(std::byte* out, const RawExpertMatrix& w1, const RawExpertMatrix& w3,
                       int64_t latent, int64_t inter, int64_t* bad_scale, cudaStream_t stream);
Status pack_expert_w2(std::byte* out, const RawExpertMatrix& w2, int64_t latent, int64_t inter,
                      int64_t* bad_scale, cudaStream_t stream);

struct ExpertsCall {
  ExpertBank bank;
  int32_t first_expert = 0;  // of this rank
  int32_t top_k = 0;
  int32_t rows = 0;                    // the bucket
  const int32_t* live_rows = nullptr;  // device
  const bf16* z = nullptr;             // [rows][latent]
  const int32_t* topk_ids = nullptr;   // [rows][top_k], global ids
  const float* topk_weights = nullptr;
  const float* norm_gain = nullptr;  // routed_expert_norm, [latent]
  float rms_eps = 0;
  float situ_beta = 0, situ_linear_beta = 0;
  // Scratch: lists [num_experts][max_rows] of assignments (row * top_k + slot; a row chooses an
  // expert at most once), counts [num_experts + 1] (last: experts with work), active [num_experts];
  // h [max_rows * top_k][inter], y [max_rows * top_k][latent].
  int32_t max_rows = 0;
  int32_t* lists = nullptr;
  int32_t* counts = nullptr;
  int32_t* active = nullptr;  // experts with work, ascending
  bf16* h = nullptr;
  bf16* y = nullptr;
  bf16* out = nullptr;  // [rows][latent]: RMSNorm of the landed sum
};
Status run_experts(const ExpertsCall& call, cudaStream_t stream);

}  // namespace k3::cuda
