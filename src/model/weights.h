// The weights of a model as plain structs one can read in a minute. Matrices are [out, in]
// row-major and point into the mapped checkpoint, as it is on disk (bf16, or MXFP4 codes and
// scales); vectors are small and are widened to float32 once, here.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "checkpoint/load_plan.h"
#include "checkpoint/tensor_source.h"
#include "config/model_config.h"
#include "core/status.h"

namespace k3 {

struct Matrix {                     // bf16, possibly unaligned
  const std::byte* data = nullptr;  // null where the source does not hold it in memory
  int64_t rows = 0, cols = 0;
  const TensorView* tensor = nullptr;
  int64_t row_bytes() const { return cols * 2; }
};

struct Mxfp4Matrix {
  const std::byte* packed = nullptr;  // [rows, cols / 2]: low nibble first
  const std::byte* scale = nullptr;   // [rows, cols / 32] E8M0
  int64_t rows = 0, cols = 0;
  const TensorView *packed_tensor = nullptr, *scale_tensor = nullptr;
  int64_t row_bytes() const { return cols / 2; }
};

struct AttnResWeights {
  std::vector<float> fold;  // norm.weight * proj.weight, [hidden]
};

struct KdaWeights {
  Matrix q_proj, k_proj, v_proj, g_proj;      // [kda_dim, hidden]
  Matrix f_a_proj;                            // [kda_head_dim, hidden]
  Matrix f_b_proj;                            // [kda_dim, kda_head_dim]
  Matrix b_proj;                              // [kda_num_heads, hidden]
  Matrix o_proj;                              // [hidden, kda_dim]
  std::vector<float> q_conv, k_conv, v_conv;  // [short_conv_kernel_size, kda_dim]: tap-major
  std::vector<float> exp_a;                   // [kda_num_heads] exp(A_log)
  std::vector<float> dt_bias;                 // [kda_dim]
  std::vector<float> o_norm;                  // [kda_head_dim]
};

struct MlaWeights {
  Matrix q_a_proj;                    // [q_lora_rank, hidden]
  std::vector<float> q_a_layernorm;   // [q_lora_rank]
  Matrix q_b_proj;                    // [heads * (nope + rope), q_lora_rank]
  Matrix kv_a_proj;                   // [kv_lora_rank + rope, hidden]
  std::vector<float> kv_a_layernorm;  // [kv_lora_rank]
  Matrix kv_b_proj;                   // [heads * (nope + v), kv_lora_rank]
  Matrix g_proj;                      // [heads * v, hidden]
  Matrix o_proj;                      // [hidden, heads * v]
};

struct DenseMlpWeights {
  Matrix gate_proj, up_proj;  // [intermediate, hidden]
  Matrix down_proj;           // [hidden, intermediate]
};

struct ExpertWeights {
  Mxfp4Matrix w1, w3;  // gate, up: [moe_intermediate, latent]
  Mxfp4Matrix w2;      // down: [latent, moe_intermediate]
};

struct MoeWeights {
  Matrix gate;                                 // router: [num_experts, hidden]
  std::vector<float> e_score_correction_bias;  // [num_experts]
  Matrix routed_expert_down_proj;              // [latent, hidden]
  std::vector<float> routed_expert_norm;       // [latent]
  Matrix routed_expert_up_proj;                // [hidden, latent]
  DenseMlpWeights shared;                      // width shared_intermediate_size
  std::vector<ExpertWeights> experts;          // this rank's, first_expert onwards
};

struct LayerWeights {
  LayerKind kind = LayerKind::kKda;
  std::vector<float> input_layernorm, post_attention_layernorm;  // [hidden]
  AttnResWeights self_attention_res, mlp_res;
  KdaWeights kda;  // by kind
  MlaWeights mla;
  bool is_moe = false;
  DenseMlpWeights dense;  // by is_moe
  MoeWeights moe;
};

struct ModelWeights {
  ModelConfig config;
  int64_t first_expert = 0, num_local_experts = 0;
  Matrix embed_tokens;      // [vocab, hidden]
  Matrix lm_head;           // [vocab, hidden]
  std::vector<float> norm;  // [hidden]
  AttnResWeights output_attn_res;
  std::vector<LayerWeights> layers;
};

// Binds names to slots. The source has already been held against the manifest, so every tensor is
// there with its dtype and shape; it must outlive the result.
Result<ModelWeights> bind_weights(const TensorSource& source, const ModelConfig& config,
                                  const RankSpec& rank);

}  // namespace k3
