#include <charconv>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "config/model_config.h"

namespace k3 {
namespace {

using nlohmann::ordered_json;

// The double whose shortest text is the float's shortest text: 1e-05, not 9.999999747378752e-06.
double shortest(float value) {
  char text[32];
  const auto end = std::to_chars(text, text + sizeof(text) - 1, value).ptr;
  *end = '\0';
  return std::strtod(text, nullptr);
}

ordered_json ids_or_null(const std::vector<int64_t>& ids) {
  if (ids.empty()) return nullptr;
  if (ids.size() == 1) return ids[0];
  return ids;
}

ordered_json id_or_null(int64_t id) {
  if (id < 0) return nullptr;
  return id;
}

}  // namespace

std::string model_config_to_json(const ModelConfig& c) {
  std::vector<int64_t> full, kda;
  for (int64_t layer = 0; layer < c.num_hidden_layers; ++layer) {
    const bool is_mla = c.layer_kinds[static_cast<size_t>(layer)] == LayerKind::kMla;
    (is_mla ? full : kda).push_back(layer + 1);
  }
  ordered_json linear = {
      {"num_heads", c.kda_num_heads},
      {"head_dim", c.kda_head_dim},
      {"short_conv_kernel_size", c.short_conv_kernel_size},
      {"use_full_rank_gate", true},
      {"gate_lower_bound", shortest(c.gate_lower_bound)},
      {"full_attn_layers", full},
      {"kda_layers", kda},
  };
  ordered_json weights = {
      {"num_bits", 4},     {"type", "float"},  {"strategy", "group"},          {"group_size", 32},
      {"symmetric", true}, {"dynamic", false}, {"scale_dtype", "torch.uint8"},
  };
  ordered_json group = {
      {"targets", ordered_json::array({"Linear"})},
      {"input_activations", nullptr},
      {"weights", weights},
  };
  ordered_json quantization = {
      {"quant_method", "compressed-tensors"},
      {"format", "mxfp4-pack-quantized"},
      {"config_groups", {{"group_0", group}}},
      {"ignore", ordered_json::array({"re:.*self_attn.*", "re:.*shared_experts.*",
                                      "re:.*mlp\\.(gate|up|down)_proj.*", "re:.*lm_head.*"})},
  };
  ordered_json text = {
      {"architectures", ordered_json::array({"KimiLinearForCausalLM"})},
      {"model_type", "kimi_linear"},
      {"dtype", "bfloat16"},
      {"hidden_act", "situ"},
      {"hidden_size", c.hidden_size},
      {"vocab_size", c.vocab_size},
      {"num_hidden_layers", c.num_hidden_layers},
      {"first_k_dense_replace", c.first_k_dense_replace},
      {"max_position_embeddings", c.max_position_embeddings},
      {"intermediate_size", c.intermediate_size},
      {"moe_intermediate_size", c.moe_intermediate_size},
      {"routed_expert_hidden_size", c.routed_expert_hidden_size},
      {"attn_res_block_size", c.attn_res_block_size},
      {"num_attention_heads", c.num_attention_heads},
      {"num_key_value_heads", c.num_attention_heads},
      {"q_lora_rank", c.q_lora_rank},
      {"kv_lora_rank", c.kv_lora_rank},
      {"qk_nope_head_dim", c.qk_nope_head_dim},
      {"qk_rope_head_dim", c.qk_rope_head_dim},
      {"v_head_dim", c.v_head_dim},
      {"mla_use_nope", true},
      {"mla_use_output_gate", true},
      {"num_experts", c.num_experts},
      {"num_experts_per_token", c.num_experts_per_token},
      {"num_shared_experts", c.num_shared_experts},
      {"num_expert_group", 1},
      {"topk_group", 1},
      {"moe_layer_freq", 1},
      {"num_nextn_predict_layers", 0},
      {"topk_method", "noaux_tc"},
      {"moe_router_activation_func", "sigmoid"},
      {"moe_renormalize", true},
      {"latent_moe_use_norm", true},
      {"routed_scaling_factor", shortest(c.routed_scaling_factor)},
      {"rms_norm_eps", shortest(c.rms_norm_eps)},
      {"activation_situ_beta", shortest(c.situ_beta)},
      {"activation_situ_linear_beta", shortest(c.situ_linear_beta)},
      {"tie_word_embeddings", false},
      {"linear_attn_config", linear},
      {"quantization_config", quantization},
  };
  ordered_json root = {
      {"architectures", ordered_json::array({"KimiK3ForConditionalGeneration"})},
      {"model_type", "kimi_k3"},
      {"dtype", "bfloat16"},
      {"tie_word_embeddings", false},
      {"bos_token_id", id_or_null(c.bos_token_id)},
      {"eos_token_id", ids_or_null(c.eos_token_ids)},
      {"pad_token_id", id_or_null(c.pad_token_id)},
      {"text_config", text},
  };
  return root.dump(2) + "\n";
}

}  // namespace k3
