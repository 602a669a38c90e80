#include "checkpoint/manifest.h"

#include <algorithm>
#include <charconv>
#include <utility>

namespace k3 {
namespace {

using Shape = std::vector<int64_t>;

class Emitter {
 public:
  Emitter(const ModelConfig& config, const std::function<void(const TensorSpec&)>& visit)
      : c_(config), visit_(visit) {}

  void all() {
    emit("model.embed_tokens.weight", {c_.vocab_size, c_.hidden_size}, TensorGroup::kEmbedding);
    for (int64_t layer = 0; layer < c_.num_hidden_layers; ++layer) {
      spec_.layer = layer;
      prefix_ = cat("model.layers.", layer, ".");
      norms();
      if (c_.layer_kinds[static_cast<size_t>(layer)] == LayerKind::kKda) {
        kda();
      } else {
        mla();
      }
      if (c_.is_moe_layer(layer)) {
        moe();
      } else {
        gated_mlp("mlp.", c_.intermediate_size, TensorGroup::kDenseMlp);
      }
    }
    spec_.layer = -1;
    prefix_.clear();
    emit("model.norm.weight", {c_.hidden_size}, TensorGroup::kNorms);
    emit("model.output_attn_res_norm.weight", {c_.hidden_size}, TensorGroup::kNorms);
    emit("model.output_attn_res_proj.weight", {1, c_.hidden_size}, TensorGroup::kNorms);
    emit("lm_head.weight", {c_.vocab_size, c_.hidden_size}, TensorGroup::kHead);
  }

 private:
  void emit(std::string_view name, Shape shape, TensorGroup group, DType dtype = DType::kBF16) {
    spec_.name = prefix_;
    spec_.name += name;
    spec_.dtype = dtype;
    spec_.group = group;
    spec_.bytes = static_cast<int64_t>(dtype_bytes(dtype));
    for (const int64_t dim : shape) spec_.bytes *= dim;
    spec_.shape = std::move(shape);
    visit_(spec_);
  }

  void norms() {
    const int64_t h = c_.hidden_size;
    emit("input_layernorm.weight", {h}, TensorGroup::kNorms);
    emit("post_attention_layernorm.weight", {h}, TensorGroup::kNorms);
    emit("self_attention_res_norm.weight", {h}, TensorGroup::kNorms);
    emit("self_attention_res_proj.weight", {1, h}, TensorGroup::kNorms);
    emit("mlp_res_norm.weight", {h}, TensorGroup::kNorms);
    emit("mlp_res_proj.weight", {1, h}, TensorGroup::kNorms);
  }

  void kda() {
    constexpr TensorGroup kGroup = TensorGroup::kKdaAttention;
    const int64_t h = c_.hidden_size, d = c_.kda_head_dim, n = c_.kda_dim();
    for (const char* x : {"q", "k", "v"}) {
      emit(cat("self_attn.", x, "_proj.weight"), {n, h}, kGroup);
      emit(cat("self_attn.", x, "_conv1d.weight"), {n, 1, c_.short_conv_kernel_size}, kGroup,
           DType::kF32);
    }
    emit("self_attn.A_log", {a_log_length(c_)}, kGroup, DType::kF32);
    emit("self_attn.dt_bias", {n}, kGroup, DType::kF32);
    emit("self_attn.b_proj.weight", {c_.kda_num_heads, h}, kGroup);
    emit("self_attn.f_a_proj.weight", {d, h}, kGroup);
    emit("self_attn.f_b_proj.weight", {n, d}, kGroup);
    emit("self_attn.o_norm.weight", {d}, kGroup, DType::kF32);
    emit("self_attn.g_proj.weight", {n, h}, kGroup);
    emit("self_attn.o_proj.weight", {h, n}, kGroup);
  }

  void mla() {
    constexpr TensorGroup kGroup = TensorGroup::kMlaAttention;
    const int64_t h = c_.hidden_size, heads = c_.num_attention_heads;
    emit("self_attn.q_a_proj.weight", {c_.q_lora_rank, h}, kGroup);
    emit("self_attn.q_a_layernorm.weight", {c_.q_lora_rank}, kGroup);
    emit("self_attn.q_b_proj.weight", {heads * c_.qk_head_dim(), c_.q_lora_rank}, kGroup);
    emit("self_attn.kv_a_proj_with_mqa.weight", {c_.mla_latent_dim(), h}, kGroup);
    emit("self_attn.kv_a_layernorm.weight", {c_.kv_lora_rank}, kGroup);
    emit("self_attn.kv_b_proj.weight",
         {heads * (c_.qk_nope_head_dim + c_.v_head_dim), c_.kv_lora_rank}, kGroup);
    emit("self_attn.g_proj.weight", {c_.mla_v_dim(), h}, kGroup);
    emit("self_attn.o_proj.weight", {h, c_.mla_v_dim()}, kGroup);
  }

  void gated_mlp(const std::string& path, int64_t width, TensorGroup group) {
    emit(path + "gate_proj.weight", {width, c_.hidden_size}, group);
    emit(path + "up_proj.weight", {width, c_.hidden_size}, group);
    emit(path + "down_proj.weight", {c_.hidden_size, width}, group);
  }

  void moe() {
    const int64_t h = c_.hidden_size, latent = c_.routed_expert_hidden_size;
    const int64_t inner = c_.moe_intermediate_size;
    emit("block_sparse_moe.gate.weight", {c_.num_experts, h}, TensorGroup::kRouter);
    emit("block_sparse_moe.gate.e_score_correction_bias", {c_.num_experts}, TensorGroup::kRouter,
         DType::kF32);
    emit("block_sparse_moe.routed_expert_down_proj.weight", {latent, h}, TensorGroup::kLatent);
    emit("block_sparse_moe.routed_expert_norm.weight", {latent}, TensorGroup::kLatent);
    emit("block_sparse_moe.routed_expert_up_proj.weight", {h, latent}, TensorGroup::kLatent);
    gated_mlp("block_sparse_moe.shared_experts.", c_.shared_intermediate_size(),
              TensorGroup::kSharedExperts);
    for (int64_t e = 0; e < c_.num_experts; ++e) {
      spec_.expert = e;
      packed(cat("block_sparse_moe.experts.", e, ".w1."), inner, latent);
      packed(cat("block_sparse_moe.experts.", e, ".w2."), latent, inner);
      packed(cat("block_sparse_moe.experts.", e, ".w3."), inner, latent);
    }
    spec_.expert = -1;
  }

  // MXFP4: two codes a byte, one scale for kMxfp4Group inputs.
  void packed(const std::string& path, int64_t out, int64_t in) {
    emit(path + "weight_packed", {out, in / 2}, TensorGroup::kRoutedExperts, DType::kU8);
    emit(path + "weight_scale", {out, in / kMxfp4Group}, TensorGroup::kRoutedExperts, DType::kU8);
  }

  const ModelConfig& c_;
  const std::function<void(const TensorSpec&)>& visit_;
  std::string prefix_;
  TensorSpec spec_;
};

}  // namespace

const char* tensor_group_name(TensorGroup group) {
  constexpr const char* kNames[kNumTensorGroups] = {
      "embedding", "KDA attention",  "MLA attention",  "norms and attn-res", "router",
      "latent",    "shared experts", "routed experts", "dense MLP",          "head"};
  return kNames[static_cast<int>(group)];
}

int64_t a_log_length(const ModelConfig& config) {
  return std::max(config.kda_num_heads, config.kda_head_dim);
}

void for_each_tensor(const ModelConfig& config,
                     const std::function<void(const TensorSpec&)>& visit) {
  Emitter(config, visit).all();
}

std::vector<TensorSpec> build_manifest(const ModelConfig& config) {
  std::vector<TensorSpec> out;
  const int64_t moe_layers =
      std::max<int64_t>(0, config.num_hidden_layers - config.first_k_dense_replace);
  out.reserve(
      static_cast<size_t>(moe_layers * config.num_experts * 6 + config.num_hidden_layers * 28 + 5));
  for_each_tensor(config, [&](const TensorSpec& spec) { out.push_back(spec); });
  return out;
}

int64_t layer_of_name(std::string_view name) {
  constexpr std::string_view kStart = "model.layers.";
  if (!name.starts_with(kStart)) return -1;
  name.remove_prefix(kStart.size());
  int64_t layer = -1;
  const auto [end, ec] = std::from_chars(name.data(), name.data() + name.size(), layer);
  const auto digits = static_cast<size_t>(end - name.data());
  if (ec != std::errc() || layer < 0 || digits >= name.size() || name[digits] != '.') return -1;
  if (digits > 1 && name[0] == '0') return -1;  // "007" is not how a layer is written
  return layer;
}

bool is_vision_name(std::string_view name) {
  return name.starts_with("vision_tower.") || name.starts_with("mm_projector.");
}

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string out = "[";
  for (size_t i = 0; i < shape.size(); ++i) {
    if (i > 0) out += ", ";
    out += std::to_string(shape[i]);
  }
  return out + "]";
}

}  // namespace k3
