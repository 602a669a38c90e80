#include "checkpoint/synth.h"

namespace k3 {
namespace {

// Byte-level tokenizer: 256 ranks, then K3's markup in its usual order.
void set_token_ids(ModelConfig* c) {
  c->bos_token_id = 256;
  c->eos_token_ids = {258, 257};  // <|end_of_msg|>, [EOS]
  c->pad_token_id = c->vocab_size - 1;
}

// Values that every K3 shares.
ModelConfig base() {
  ModelConfig c;
  c.first_k_dense_replace = 1;
  c.qk_nope_head_dim = 128;
  c.qk_rope_head_dim = 64;
  c.v_head_dim = 128;
  c.kv_lora_rank = 512;
  c.kda_head_dim = 128;
  c.short_conv_kernel_size = 4;
  c.gate_lower_bound = -5.0f;
  c.num_shared_experts = 2;
  c.routed_scaling_factor = 1.0f;
  c.situ_beta = 4.0f;
  c.situ_linear_beta = 25.0f;
  c.rms_norm_eps = 1e-5f;
  return c;
}

ModelConfig release() {
  ModelConfig c = base();
  c.hidden_size = 7168;
  c.vocab_size = 163840;
  c.num_hidden_layers = 93;
  c.intermediate_size = 33792;
  c.max_position_embeddings = 1048576;
  c.attn_res_block_size = 12;
  c.num_attention_heads = 96;
  c.q_lora_rank = 1536;
  c.kda_num_heads = 96;
  c.num_experts = 896;
  c.num_experts_per_token = 16;
  c.moe_intermediate_size = 3072;
  c.routed_expert_hidden_size = 3584;
  return c;
}

ModelConfig tiny() {
  ModelConfig c = base();
  c.hidden_size = 256;
  c.vocab_size = 2048;
  c.num_hidden_layers = 13;
  c.intermediate_size = 512;
  c.max_position_embeddings = 8192;
  c.attn_res_block_size = 4;
  c.num_attention_heads = 2;
  c.q_lora_rank = 192;
  c.kda_num_heads = 2;
  c.num_experts = 32;
  c.num_experts_per_token = 4;
  c.moe_intermediate_size = 128;
  c.routed_expert_hidden_size = 128;
  return c;
}

// For CPU benchmarks: larger than any cache, and most of it routed experts, as in the release.
ModelConfig one_gib() {
  ModelConfig c = base();
  c.hidden_size = 1024;
  c.vocab_size = 32768;
  c.num_hidden_layers = 13;
  c.intermediate_size = 4096;
  c.max_position_embeddings = 32768;
  c.attn_res_block_size = 4;
  c.num_attention_heads = 8;
  c.q_lora_rank = 384;
  c.kda_num_heads = 8;
  c.num_experts = 128;
  c.num_experts_per_token = 8;
  c.moe_intermediate_size = 512;
  c.routed_expert_hidden_size = 512;
  return c;
}

}  // namespace

Result<ModelConfig> synth_preset(std::string_view name, int64_t layers, int64_t experts) {
  ModelConfig c;
  if (name == "k3") {
    c = release();
  } else if (name == "tiny") {
    c = tiny();
  } else if (name == "1g") {
    c = one_gib();
  } else {
    return invalid_argument("preset: found \"", name, "\", expected tiny, 1g or k3");
  }
  if (layers > 1024) return invalid_argument("layers: found ", layers, ", expected at most 1024");
  if (layers > 0) c.num_hidden_layers = layers;
  if (experts > 0) c.num_experts = experts;
  c.num_checkpoint_layers = c.num_hidden_layers;
  for (int64_t i = 0; i < c.num_hidden_layers; ++i) {
    const bool mla = i % 4 == 3 || i == c.num_hidden_layers - 1;
    c.layer_kinds.push_back(mla ? LayerKind::kMla : LayerKind::kKda);
  }
  set_token_ids(&c);
  K3_RETURN_IF_ERROR(validate_model_config(c, cat("preset ", name)));
  return c;
}

}  // namespace k3
