#include "model/weights.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "core/dtype.h"

namespace k3 {
namespace {

class Binder {
 public:
  explicit Binder(const TensorSource& source) : source_(source) {}

  Matrix matrix(const std::string& name) {
    const TensorView* t = find(name);
    if (t == nullptr) return {};
    return {t->data, t->shape.at(0), t->shape.at(1), t};
  }

  Mxfp4Matrix mxfp4(const std::string& name) {
    const TensorView* packed = find(name + ".weight_packed");
    const TensorView* scale = find(name + ".weight_scale");
    if (packed == nullptr || scale == nullptr) return {};
    return {packed->data, scale->data, packed->shape.at(0), packed->shape.at(1) * 2, packed, scale};
  }

  // A small bf16 or f32 tensor, widened.
  std::vector<float> vector(const std::string& name) {
    const TensorView* t = find(name);
    if (t == nullptr) return {};
    std::vector<float> out(static_cast<size_t>(t->bytes) / dtype_bytes(t->dtype));
    if (t->dtype == DType::kF32) {
      source_.read(*t, 0, t->bytes, reinterpret_cast<std::byte*>(out.data()));
    } else {
      std::vector<uint16_t> raw(out.size());
      source_.read(*t, 0, t->bytes, reinterpret_cast<std::byte*>(raw.data()));
      std::transform(raw.begin(), raw.end(), out.begin(), bf16_to_f32);
    }
    // Read once anyway; a NaN here (a router's bias, say) can end in answers that look like
    // answers.
    for (size_t i = 0; i < out.size() && status_.ok(); ++i) {
      if (std::isfinite(out[i])) continue;
      status_ = checkpoint_error("tensor ", name, ": element ", i, ": found ", out[i],
                                 ", expected finite values");
    }
    return out;
  }

  AttnResWeights attn_res(const std::string& prefix) {
    AttnResWeights w{vector(prefix + "_norm.weight")};
    const std::vector<float> proj = vector(prefix + "_proj.weight");
    for (size_t i = 0; i < w.fold.size() && i < proj.size(); ++i) w.fold[i] *= proj[i];
    return w;
  }

  // [channels, 1, width] in the file; the kernel walks channels, so taps become the outer index.
  std::vector<float> conv(const std::string& name, int64_t channels, int64_t width) {
    const std::vector<float> raw = vector(name);
    std::vector<float> out(raw.size());
    if (static_cast<int64_t>(raw.size()) != channels * width) return out;
    for (int64_t c = 0; c < channels; ++c) {
      for (int64_t j = 0; j < width; ++j) {
        out[static_cast<size_t>(j * channels + c)] = raw[static_cast<size_t>(c * width + j)];
      }
    }
    return out;
  }

  DenseMlpWeights mlp(const std::string& prefix) {
    return {matrix(prefix + "gate_proj.weight"), matrix(prefix + "up_proj.weight"),
            matrix(prefix + "down_proj.weight")};
  }

  const Status& status() const { return status_; }

 private:
  const TensorView* find(const std::string& name) {
    const TensorView* t = source_.find(name);
    if (t == nullptr && status_.ok()) {
      status_ = checkpoint_error("tensor ", name, ": not in this rank's load plan");
    }
    return t;
  }

  const TensorSource& source_;
  Status status_;
};

KdaWeights bind_kda(Binder& b, const std::string& p, const ModelConfig& c) {
  KdaWeights w;
  w.q_proj = b.matrix(p + "q_proj.weight");
  w.k_proj = b.matrix(p + "k_proj.weight");
  w.v_proj = b.matrix(p + "v_proj.weight");
  w.g_proj = b.matrix(p + "g_proj.weight");
  w.f_a_proj = b.matrix(p + "f_a_proj.weight");
  w.f_b_proj = b.matrix(p + "f_b_proj.weight");
  w.b_proj = b.matrix(p + "b_proj.weight");
  w.o_proj = b.matrix(p + "o_proj.weight");
  w.q_conv = b.conv(p + "q_conv1d.weight", c.kda_dim(), c.short_conv_kernel_size);
  w.k_conv = b.conv(p + "k_conv1d.weight", c.kda_dim(), c.short_conv_kernel_size);
  w.v_conv = b.conv(p + "v_conv1d.weight", c.kda_dim(), c.short_conv_kernel_size);
  // The file pads A_log past the heads with zeros (the contract has asserted it).
  w.exp_a = b.vector(p + "A_log");
  w.exp_a.resize(static_cast<size_t>(c.kda_num_heads));
  for (float& a : w.exp_a) a = static_cast<float>(std::exp(static_cast<double>(a)));
  w.dt_bias = b.vector(p + "dt_bias");
  w.o_norm = b.vector(p + "o_norm.weight");
  return w;
}

MlaWeights bind_mla(Binder& b, const std::string& p) {
  MlaWeights w;
  w.q_a_proj = b.matrix(p + "q_a_proj.weight");
  w.q_a_layernorm = b.vector(p + "q_a_layernorm.weight");
  w.q_b_proj = b.matrix(p + "q_b_proj.weight");
  w.kv_a_proj = b.matrix(p + "kv_a_proj_with_mqa.weight");
  w.kv_a_layernorm = b.vector(p + "kv_a_layernorm.weight");
  w.kv_b_proj = b.matrix(p + "kv_b_proj.weight");
  w.g_proj = b.matrix(p + "g_proj.weight");
  w.o_proj = b.matrix(p + "o_proj.weight");
  return w;
}

MoeWeights bind_moe(Binder& b, const std::string& p, int64_t first_expert, int64_t num_experts) {
  MoeWeights w;
  w.gate = b.matrix(p + "gate.weight");
  w.e_score_correction_bias = b.vector(p + "gate.e_score_correction_bias");
  w.routed_expert_down_proj = b.matrix(p + "routed_expert_down_proj.weight");
  w.routed_expert_norm = b.vector(p + "routed_expert_norm.weight");
  w.routed_expert_up_proj = b.matrix(p + "routed_expert_up_proj.weight");
  w.shared = b.mlp(p + "shared_experts.");
  w.experts.resize(static_cast<size_t>(num_experts));
  for (int64_t e = 0; e < num_experts; ++e) {
    const std::string ep = cat(p, "experts.", first_expert + e, ".");
    w.experts[static_cast<size_t>(e)] = {b.mxfp4(ep + "w1"), b.mxfp4(ep + "w3"),
                                         b.mxfp4(ep + "w2")};
  }
  return w;
}

}  // namespace

Result<ModelWeights> bind_weights(const TensorSource& source, const ModelConfig& config,
                                  const RankSpec& rank) {
  Binder b(source);
  ModelWeights w;
  w.config = config;
  w.num_local_experts = config.num_experts / rank.ep_size;
  w.first_expert = rank.ep_rank * w.num_local_experts;
  w.embed_tokens = b.matrix("model.embed_tokens.weight");
  w.lm_head = b.matrix("lm_head.weight");
  w.norm = b.vector("model.norm.weight");
  w.output_attn_res = b.attn_res("model.output_attn_res");
  w.layers.resize(static_cast<size_t>(config.num_hidden_layers));
  for (int64_t l = 0; l < config.num_hidden_layers; ++l) {
    LayerWeights& layer = w.layers[static_cast<size_t>(l)];
    const std::string p = cat("model.layers.", l, ".");
    layer.kind = config.layer_kinds[static_cast<size_t>(l)];
    layer.input_layernorm = b.vector(p + "input_layernorm.weight");
    layer.post_attention_layernorm = b.vector(p + "post_attention_layernorm.weight");
    layer.self_attention_res = b.attn_res(p + "self_attention_res");
    layer.mlp_res = b.attn_res(p + "mlp_res");
    if (layer.kind == LayerKind::kKda) {
      layer.kda = bind_kda(b, p + "self_attn.", config);
    } else {
      layer.mla = bind_mla(b, p + "self_attn.");
    }
    layer.is_moe = config.is_moe_layer(l);
    if (layer.is_moe) {
      layer.moe = bind_moe(b, p + "block_sparse_moe.", w.first_expert, w.num_local_experts);
    } else {
      layer.dense = b.mlp(p + "mlp.");
    }
  }
  K3_RETURN_IF_ERROR(b.status());
  return w;
}

}  // namespace k3
