// The only reader of config.json. Every dimension of the model comes from here, so the 93-layer
// release and a 9-layer test checkpoint run through the same code; every value that changes the
// mathematics is compared with what this program computes and refused by name if it differs.
// Source of the table of values: docs/model.md#config.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/status.h"

namespace k3 {

enum class LayerKind { kKda, kMla };

struct ModelConfig {
  // Widths. Shapes in comments elsewhere use these names.
  int64_t hidden_size = 0;
  int64_t vocab_size = 0;
  int64_t num_hidden_layers = 0;
  // Layers of the checkpoint itself: more than num_hidden_layers after truncate_layers().
  int64_t num_checkpoint_layers = 0;
  int64_t intermediate_size = 0;  // dense MLP of layers < first_k_dense_replace
  int64_t first_k_dense_replace = 1;
  int64_t max_position_embeddings = 0;
  int64_t attn_res_block_size = 0;  // a snapshot of the stream at layers 0, b, 2b, ...

  // Latent attention (MLA).
  int64_t num_attention_heads = 0;
  int64_t q_lora_rank = 0;
  int64_t kv_lora_rank = 0;
  int64_t qk_nope_head_dim = 0;
  int64_t qk_rope_head_dim = 0;  // never rotated: K3 is NoPE
  int64_t v_head_dim = 0;

  // Kimi Delta Attention (KDA).
  int64_t kda_num_heads = 0;
  int64_t kda_head_dim = 0;
  int64_t short_conv_kernel_size = 0;
  float gate_lower_bound = 0;  // log-decay = gate_lower_bound * sigmoid(...)

  // Latent mixture of experts.
  int64_t num_experts = 0;
  int64_t num_experts_per_token = 0;  // top_k
  int64_t num_shared_experts = 0;
  int64_t moe_intermediate_size = 0;
  int64_t routed_expert_hidden_size = 0;  // latent width
  float routed_scaling_factor = 1;

  float situ_beta = 0;         // situ(g,u) = beta*tanh(g/beta)*sigmoid(g)
  float situ_linear_beta = 0;  //             * linear_beta*tanh(u/linear_beta)
  float rms_norm_eps = 0;

  std::vector<LayerKind> layer_kinds;  // [num_hidden_layers], zero-based

  // Token ids of config.json; the engine stops on every one of eos_token_ids.
  int64_t bos_token_id = -1;
  int64_t pad_token_id = -1;
  std::vector<int64_t> eos_token_ids;

  // Keys that were found but change nothing here (reported once at load, never silently dropped):
  // sorted paths within the text config ("rope_theta", "linear_attn_config.x") or, for what stands
  // beside `text_config` in the wrapper, "/vision_config".
  std::vector<std::string> ignored_keys;

  // Derived shapes.
  bool is_moe_layer(int64_t layer) const { return layer >= first_k_dense_replace; }
  bool is_snapshot_layer(int64_t layer) const { return layer % attn_res_block_size == 0; }
  int64_t num_snapshots() const {
    return (num_hidden_layers + attn_res_block_size - 1) / attn_res_block_size;
  }
  int64_t qk_head_dim() const { return qk_nope_head_dim + qk_rope_head_dim; }
  int64_t mla_latent_dim() const { return kv_lora_rank + qk_rope_head_dim; }  // cached per token
  int64_t mla_v_dim() const { return num_attention_heads * v_head_dim; }
  int64_t kda_dim() const { return kda_num_heads * kda_head_dim; }
  int64_t shared_intermediate_size() const { return num_shared_experts * moe_intermediate_size; }
  int64_t num_kda_layers() const;
  int64_t num_mla_layers() const;

  bool operator==(const ModelConfig&) const = default;
};

// Parses the text of a config.json: the multimodal wrapper (`text_config`) or the bare text config.
// `origin` names the file in messages. Errors: kCheckpoint, naming the key, the value found and the
// value expected.
Result<ModelConfig> parse_model_config(std::string_view json_text, const std::string& origin);

// Reads DIR/config.json, and DIR/generation_config.json where present (its eos_token_id values join
// eos_token_ids).
Result<ModelConfig> load_model_config(const std::string& model_dir);

// The same model cut to its first `num_layers` layers (0 < num_layers <= num_hidden_layers): the
// final mix then sees the snapshots of those layers alone.
Result<ModelConfig> truncate_layers(const ModelConfig& config, int64_t num_layers);

// The rules that tie the values of one config together (heads, groups of 32, lists, ids) and the
// bounds under which no shape, byte count or offset computed from it overflows int64_t. Parsing
// ends with this; whoever builds a ModelConfig by hand calls it too. Errors: kCheckpoint, naming
// the key.
Status validate_model_config(const ModelConfig& config, const std::string& origin);

// The config.json (wrapper form) from which parse_model_config() reads `config` back, token ids
// included; ignored keys are not written.
std::string model_config_to_json(const ModelConfig& config);

}  // namespace k3
