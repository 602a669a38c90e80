#include "cpu/forward.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpu/products.h"

namespace k3 {
namespace {

const RowSpan& span_of(const std::vector<RowSpan>& spans, int64_t row) {
  const auto after =
      std::upper_bound(spans.begin(), spans.end(), row,
                       [](int64_t r, const RowSpan& span) { return r < span.first_row; });
  return *(after - 1);
}

}  // namespace

Status Workspace::allocate(const ModelConfig& c, int64_t max_rows, int64_t max_logit_rows,
                           int num_slots, int64_t num_pages, int num_threads, bool bf16) {
  const int64_t heads = c.num_attention_heads;
  const int64_t attn_width = std::max(c.kda_dim(), c.mla_v_dim());
  const int64_t mlp_width = std::max(c.intermediate_size, c.shared_intermediate_size());
  const KdaStateLayout kda(c);
  const LatentCacheLayout cache(c, bf16 ? 2 : 4);
  thread_scratch_stride = std::max(kda_scratch_floats(c.kda_head_dim), 2 * c.num_experts) + 16;
  const auto rows = [&](Buffer<float>& b, const char* what, int64_t width) {
    return b.allocate(what, max_rows * width);
  };
  K3_RETURN_IF_ERROR(rows(stream, "stream", c.hidden_size));
  K3_RETURN_IF_ERROR(snapshots.allocate("snapshots", snapshot_layout.size()));
  K3_RETURN_IF_ERROR(rows(mixed, "mixed stream", c.hidden_size));
  K3_RETURN_IF_ERROR(rows(delta, "layer output", c.hidden_size));
  K3_RETURN_IF_ERROR(rows(delta2, "shared expert output", c.hidden_size));
  K3_RETURN_IF_ERROR(rows(qkv, "q, k, v", std::max(3 * c.kda_dim(), heads * c.qk_head_dim())));
  K3_RETURN_IF_ERROR(rows(gate, "output gate", attn_width));
  K3_RETURN_IF_ERROR(rows(low, "low-rank rows", std::max(c.kda_head_dim, c.q_lora_rank)));
  K3_RETURN_IF_ERROR(rows(decay, "decay", c.kda_dim()));
  K3_RETURN_IF_ERROR(rows(beta, "beta", c.kda_num_heads));
  K3_RETURN_IF_ERROR(rows(latent, "latent rows", c.mla_latent_dim()));
  K3_RETURN_IF_ERROR(rows(q_latent, "absorbed query", heads * c.mla_latent_dim()));
  K3_RETURN_IF_ERROR(rows(o_latent, "attended latents", heads * c.kv_lora_rank));
  K3_RETURN_IF_ERROR(rows(attn, "attention output", attn_width));
  K3_RETURN_IF_ERROR(rows(mlp_gate, "MLP gate", mlp_width));
  K3_RETURN_IF_ERROR(rows(mlp_up, "MLP up", mlp_width));
  K3_RETURN_IF_ERROR(rows(router_logits, "router logits", c.num_experts));
  K3_RETURN_IF_ERROR(rows(z, "expert latents", c.routed_expert_hidden_size));
  K3_RETURN_IF_ERROR(rows(combined, "combined latents", c.routed_expert_hidden_size));
  K3_RETURN_IF_ERROR(topk_ids.allocate("top-k ids", max_rows * c.num_experts_per_token));
  K3_RETURN_IF_ERROR(rows(topk_weights, "top-k weights", c.num_experts_per_token));
  K3_RETURN_IF_ERROR(
      thread_scratch.allocate("thread scratch", num_threads * thread_scratch_stride));
  K3_RETURN_IF_ERROR(head_in.allocate("head input", max_logit_rows * c.hidden_size));
  K3_RETURN_IF_ERROR(logits.allocate("logits", max_logit_rows * c.vocab_size));
  K3_RETURN_IF_ERROR(kda_state.allocate("KDA state", num_slots * kda.state_per_slot()));
  K3_RETURN_IF_ERROR(kda_window.allocate("KDA windows", num_slots * kda.window_per_slot()));
  K3_RETURN_IF_ERROR(latent_cache.allocate("KV pages", num_pages * cache.page_bytes()));
  return {};
}

int64_t Workspace::scratch_bytes() const {
  int64_t sum = topk_ids.bytes();
  for (const Buffer<float>* b :
       {&stream,   &snapshots,    &mixed,          &delta,   &delta2,        &qkv,
        &gate,     &low,          &decay,          &beta,    &latent,        &q_latent,
        &o_latent, &attn,         &mlp_gate,       &mlp_up,  &router_logits, &z,
        &combined, &topk_weights, &thread_scratch, &head_in, &logits}) {
    sum += b->bytes();
  }
  return sum;
}

Forward::Forward(const ModelWeights* weights, Workspace* workspace, ThreadPool* pool,
                 const Kernels* kernels, NumericsPolicy policy, MegaMoe* moe)
    : weights_(*weights),
      c_(weights->config),
      ws_(*workspace),
      pool_(*pool),
      k_(*kernels),
      policy_(policy),
      bf16_(policy.bf16()),
      moe_(*moe),
      kda_layout_(c_),
      cache_layout_(c_, bf16_ ? 2 : 4) {
  const auto add = [this](std::initializer_list<const Matrix*> matrices) {
    for (const Matrix* m : matrices) layer_bytes_ += m->rows * m->row_bytes();
  };
  for (const LayerWeights& l : weights_.layers) {
    add({&l.kda.q_proj,
         &l.kda.k_proj,
         &l.kda.v_proj,
         &l.kda.g_proj,
         &l.kda.f_a_proj,
         &l.kda.f_b_proj,
         &l.kda.b_proj,
         &l.kda.o_proj,
         &l.mla.q_a_proj,
         &l.mla.q_b_proj,
         &l.mla.kv_a_proj,
         &l.mla.kv_b_proj,
         &l.mla.g_proj,
         &l.mla.o_proj,
         &l.dense.gate_proj,
         &l.dense.up_proj,
         &l.dense.down_proj,
         &l.moe.gate,
         &l.moe.routed_expert_down_proj,
         &l.moe.routed_expert_up_proj,
         &l.moe.shared.gate_proj,
         &l.moe.shared.up_proj,
         &l.moe.shared.down_proj});
  }
}

void Forward::embed(const std::vector<int32_t>& tokens) {
  const int64_t h = c_.hidden_size;
  pool_.parallel_for(rows_, [&](int64_t row, int) {
    const int64_t id = tokens[static_cast<size_t>(row)];
    k_.bf16_to_f32(weights_.embed_tokens.data + id * weights_.embed_tokens.row_bytes(),
                   ws_.stream.data() + row * h, h);
  });
}

// out = RMSNorm(AttnRes(stream, first `bank` snapshots)); with an empty bank the mix is the stream.
void Forward::mix_into(const float* stream_row, int64_t row, int64_t bank, const AttnResWeights& w,
                       const std::vector<float>& norm, float* out) {
  const int64_t h = c_.hidden_size;
  const float* x = stream_row;
  if (bank > 0) {
    AttnResArgs a;
    a.snapshots = ws_.snapshots.data() + ws_.snapshot_layout.at(0, row);
    a.snapshot_stride = ws_.snapshot_layout.stride();
    a.count = bank;
    a.stream = stream_row;
    a.fold = w.fold.data();
    a.n = h;
    a.eps = c_.rms_norm_eps;
    a.out = out;
    a.bf16 = bf16_;
    k_.attn_res(a);
    x = out;
  }
  k_.rms_norm({x, norm.data(), h, c_.rms_norm_eps, out, bf16_});
}

void Forward::attention_input(int64_t layer) {
  const LayerWeights& w = weights_.layers[static_cast<size_t>(layer)];
  const int64_t h = c_.hidden_size;
  // Snapshots taken by the layers before this one; its own joins after the mix has been made.
  const int64_t bank = (layer + c_.attn_res_block_size - 1) / c_.attn_res_block_size;
  pool_.parallel_for(rows_, [&](int64_t row, int) {
    const float* p = ws_.stream.data() + row * h;
    mix_into(p, row, bank, w.self_attention_res, w.input_layernorm, ws_.mixed.data() + row * h);
    if (c_.is_snapshot_layer(layer)) {
      std::copy(p, p + h, ws_.snapshots.data() + ws_.snapshot_layout.at(bank, row));
    }
  });
}

void Forward::kda_layer(const KdaWeights& w, int64_t kda_index, const std::vector<RowSpan>& spans) {
  const int64_t h = c_.hidden_size, dim = c_.kda_dim(), d = c_.kda_head_dim;
  const int64_t heads = c_.kda_num_heads;
  const float* x = ws_.mixed.data();
  run_products(pool_, k_, rows_,
               {{&w.q_proj, x, h, ws_.qkv.data(), 3 * dim, bf16_},
                {&w.k_proj, x, h, ws_.qkv.data() + dim, 3 * dim, bf16_},
                {&w.v_proj, x, h, ws_.qkv.data() + 2 * dim, 3 * dim, bf16_},
                {&w.g_proj, x, h, ws_.gate.data(), dim, bf16_},
                {&w.f_a_proj, x, h, ws_.low.data(), d, bf16_},
                {&w.b_proj, x, h, ws_.beta.data(), heads, bf16_}});
  run_products(pool_, k_, rows_, {{&w.f_b_proj, ws_.low.data(), d, ws_.decay.data(), dim, bf16_}});
  pool_.parallel_for(static_cast<int64_t>(spans.size()) * heads, [&](int64_t item, int thread) {
    const RowSpan& span = spans[static_cast<size_t>(item / heads)];
    const int64_t head = item % heads;
    KdaArgs a;
    a.tokens = span.tokens;
    a.head_dim = d;
    a.conv_width = c_.short_conv_kernel_size;
    a.q = ws_.qkv.data() + span.first_row * 3 * dim + head * d;
    a.k = a.q + dim;
    a.v = a.k + dim;
    a.qkv_stride = 3 * dim;
    a.gate = ws_.gate.data() + span.first_row * dim + head * d;
    a.gate_stride = dim;
    a.decay = ws_.decay.data() + span.first_row * dim + head * d;
    a.decay_stride = dim;
    a.beta = ws_.beta.data() + span.first_row * heads + head;
    a.beta_stride = heads;
    a.q_conv = w.q_conv.data() + head * d;
    a.k_conv = w.k_conv.data() + head * d;
    a.v_conv = w.v_conv.data() + head * d;
    a.conv_stride = dim;
    a.dt_bias = w.dt_bias.data() + head * d;
    a.exp_a = w.exp_a[static_cast<size_t>(head)];
    a.gate_lower_bound = c_.gate_lower_bound;
    a.o_norm = w.o_norm.data();
    a.rms_eps = c_.rms_norm_eps;
    a.l2_eps = policy_.l2_norm_eps;
    a.fresh = span.position == 0;
    a.window = ws_.kda_window.data() + kda_layout_.window_at(span.slot, kda_index, head);
    a.state = ws_.kda_state.data() + kda_layout_.state_at(span.slot, kda_index, head);
    a.out = ws_.attn.data() + span.first_row * dim + head * d;
    a.out_stride = dim;
    a.scratch = ws_.thread_scratch.data() + thread * ws_.thread_scratch_stride;
    a.bf16 = bf16_;
    k_.kda(a);
  });
  run_products(pool_, k_, rows_, {{&w.o_proj, ws_.attn.data(), dim, ws_.delta.data(), h, bf16_}});
}

void Forward::mla_layer(const MlaWeights& w, int64_t mla_index, const std::vector<RowSpan>& spans) {
  const int64_t h = c_.hidden_size, heads = c_.num_attention_heads;
  const int64_t nope = c_.qk_nope_head_dim, rope = c_.qk_rope_head_dim, v = c_.v_head_dim;
  const int64_t rank = c_.kv_lora_rank, latent_dim = c_.mla_latent_dim(), qk = c_.qk_head_dim();
  const int64_t q_width = heads * qk, v_width = c_.mla_v_dim();
  const float* x = ws_.mixed.data();
  run_products(pool_, k_, rows_,
               {{&w.q_a_proj, x, h, ws_.low.data(), c_.q_lora_rank, bf16_},
                {&w.kv_a_proj, x, h, ws_.latent.data(), latent_dim, bf16_},
                {&w.g_proj, x, h, ws_.gate.data(), v_width, bf16_}});
  // Norm the query's low rank and the latent; the latent row joins the cache before anyone attends.
  pool_.parallel_for(rows_, [&](int64_t row, int) {
    const RowSpan& span = span_of(spans, row);
    const int64_t position = span.position + row - span.first_row;
    float* q_a = ws_.low.data() + row * c_.q_lora_rank;
    k_.rms_norm({q_a, w.q_a_layernorm.data(), c_.q_lora_rank, policy_.lora_norm_eps, q_a, bf16_});
    float* latent = ws_.latent.data() + row * latent_dim;
    k_.rms_norm({latent, w.kv_a_layernorm.data(), rank, policy_.lora_norm_eps, latent, bf16_});
    std::byte* cached =
        ws_.latent_cache.data() +
        cache_layout_.row_at(span.pages[position / kPageTokens], mla_index, position % kPageTokens);
    if (bf16_) {
      k_.f32_to_bf16(latent, cached, latent_dim);
    } else {
      std::memcpy(cached, latent, static_cast<size_t>(latent_dim) * sizeof(float));
    }
  });
  run_products(pool_, k_, rows_,
               {{&w.q_b_proj, ws_.low.data(), c_.q_lora_rank, ws_.qkv.data(), q_width, bf16_}});

  // Absorb: q_latent[row, head] = [W_UK[head]^T q_nope | q_rope], so that scores read the cache as
  // is.
  constexpr int64_t kRows = 16;
  const int64_t row_blocks = (rows_ + kRows - 1) / kRows;
  pool_.parallel_for(heads * row_blocks, [&](int64_t item, int) {
    const int64_t head = item / row_blocks;
    const int64_t first = item % row_blocks * kRows;
    GemmArgs a;
    a.x = ws_.qkv.data() + first * q_width + head * qk;
    a.ldx = q_width;
    a.rows = std::min(kRows, rows_ - first);
    a.k = rank;
    a.w = w.kv_b_proj.data;
    a.w_stride = w.kv_b_proj.row_bytes();
    a.n_begin = head * (nope + v);
    a.n_end = a.n_begin + nope;
    a.y = ws_.q_latent.data() + (first * heads + head) * latent_dim;
    a.ldy = heads * latent_dim;
    k_.gemm_bf16_t(a);
    for (int64_t r = 0; r < a.rows; ++r) {
      const float* q_rope = a.x + r * q_width + nope;
      std::copy(q_rope, q_rope + rope, a.y + r * a.ldy + rank);
    }
  });

  // Heads of a row share the loads of its latents; how many share is free (each head stands alone).
  const int64_t per_item =
      std::clamp<int64_t>(heads * rows_ / pool_.num_threads(), 1, std::min(heads, kMlaHeadBlock));
  const int64_t head_blocks = (heads + per_item - 1) / per_item;
  const auto scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(qk)));
  pool_.parallel_for(rows_ * head_blocks, [&](int64_t item, int) {
    const int64_t row = item / head_blocks;
    const int64_t head = item % head_blocks * per_item;
    const RowSpan& span = span_of(spans, row);
    MlaAttendArgs a;
    a.q = ws_.q_latent.data() + (row * heads + head) * latent_dim;
    a.heads = std::min(per_item, heads - head);
    a.latent_dim = latent_dim;
    a.kv_lora_rank = rank;
    a.context = span.position + (row - span.first_row) + 1;
    a.cache = ws_.latent_cache.data() + mla_index * cache_layout_.layer_bytes();
    a.page_stride = cache_layout_.page_bytes();
    a.cache_bf16 = bf16_;
    a.pages = span.pages;
    a.scale = scale;
    a.out = ws_.o_latent.data() + (row * heads + head) * rank;
    k_.mla_attend(a);
  });

  // Back up through W_UV, then the output gate.
  pool_.parallel_for(heads * row_blocks, [&](int64_t item, int) {
    const int64_t head = item / row_blocks;
    const int64_t first = item % row_blocks * kRows;
    GemmArgs a;
    a.x = ws_.o_latent.data() + (first * heads + head) * rank;
    a.ldx = heads * rank;
    a.rows = std::min(kRows, rows_ - first);
    a.k = rank;
    a.w = w.kv_b_proj.data;
    a.w_stride = w.kv_b_proj.row_bytes();
    a.n_begin = head * (nope + v) + nope;
    a.n_end = a.n_begin + v;
    a.y_column = a.n_begin;
    a.y = ws_.attn.data() + first * v_width + head * v;
    a.ldy = v_width;
    a.land_bf16 = bf16_;
    k_.gemm_bf16(a);
    for (int64_t r = 0; r < a.rows; ++r) {
      k_.sigmoid_gate(a.y + r * v_width, ws_.gate.data() + (first + r) * v_width + head * v, v,
                      bf16_);
    }
  });
  run_products(pool_, k_, rows_,
               {{&w.o_proj, ws_.attn.data(), v_width, ws_.delta.data(), h, bf16_}});
}

void Forward::mlp_input(int64_t layer) {
  const LayerWeights& w = weights_.layers[static_cast<size_t>(layer)];
  const int64_t h = c_.hidden_size;
  const int64_t bank = layer / c_.attn_res_block_size + 1;
  pool_.parallel_for(rows_, [&](int64_t row, int) {
    float* p = ws_.stream.data() + row * h;
    const float* a = ws_.delta.data() + row * h;
    if (c_.is_snapshot_layer(layer)) {
      std::copy(a, a + h, p);  // the old stream lives on in its snapshot alone
    } else {
      k_.add(p, a, p, h, bf16_);
    }
    mix_into(p, row, bank, w.mlp_res, w.post_attention_layernorm, ws_.mixed.data() + row * h);
  });
}

// out = down( situ( gate x, up x ) )
void Forward::dense_mlp(const DenseMlpWeights& w, int64_t width, const float* x, float* out) {
  const int64_t h = c_.hidden_size;
  run_products(pool_, k_, rows_,
               {{&w.gate_proj, x, h, ws_.mlp_gate.data(), width, bf16_},
                {&w.up_proj, x, h, ws_.mlp_up.data(), width, bf16_}});
  pool_.parallel_for(rows_, [&](int64_t row, int) {
    float* g = ws_.mlp_gate.data() + row * width;
    k_.situ(g, ws_.mlp_up.data() + row * width, g, width, c_.situ_beta, c_.situ_linear_beta, bf16_);
  });
  run_products(pool_, k_, rows_, {{&w.down_proj, ws_.mlp_gate.data(), width, out, h, bf16_}});
}

Status Forward::moe_mlp(const MoeWeights& w, int64_t layer) {
  const int64_t h = c_.hidden_size, latent = c_.routed_expert_hidden_size;
  const int64_t shared = c_.shared_intermediate_size(), top_k = c_.num_experts_per_token;
  const float* x = ws_.mixed.data();
  run_products(pool_, k_, rows_,
               {{&w.gate, x, h, ws_.router_logits.data(), c_.num_experts, false},
                {&w.routed_expert_down_proj, x, h, ws_.z.data(), latent, bf16_},
                {&w.shared.gate_proj, x, h, ws_.mlp_gate.data(), shared, bf16_},
                {&w.shared.up_proj, x, h, ws_.mlp_up.data(), shared, bf16_}});
  pool_.parallel_for(rows_, [&](int64_t row, int thread) {
    RouterArgs a;
    a.logits = ws_.router_logits.data() + row * c_.num_experts;
    a.bias = w.e_score_correction_bias.data();
    a.num_experts = c_.num_experts;
    a.top_k = top_k;
    a.scaling = c_.routed_scaling_factor;
    a.ids = ws_.topk_ids.data() + row * top_k;
    a.weights = ws_.topk_weights.data() + row * top_k;
    a.scratch = ws_.thread_scratch.data() + thread * ws_.thread_scratch_stride;
    k_.router(a);
    float* g = ws_.mlp_gate.data() + row * shared;
    k_.situ(g, ws_.mlp_up.data() + row * shared, g, shared, c_.situ_beta, c_.situ_linear_beta,
            bf16_);
  });
  K3_RETURN_IF_ERROR(moe_.run({layer, rows_, ws_.z.data(), ws_.topk_ids.data(),
                               ws_.topk_weights.data(), ws_.combined.data(), &bytes_}));
  pool_.parallel_for(rows_, [&](int64_t row, int) {
    float* y = ws_.combined.data() + row * latent;
    k_.rms_norm({y, w.routed_expert_norm.data(), latent, c_.rms_norm_eps, y, bf16_});
  });
  run_products(pool_, k_, rows_,
               {{&w.routed_expert_up_proj, ws_.combined.data(), latent, ws_.delta.data(), h, bf16_},
                {&w.shared.down_proj, ws_.mlp_gate.data(), shared, ws_.delta2.data(), h, bf16_}});
  pool_.parallel_for(rows_, [&](int64_t row, int) {
    float* y = ws_.delta.data() + row * h;
    k_.add(y, ws_.delta2.data() + row * h, y, h, bf16_);
  });
  return {};
}

void Forward::head(const std::vector<int64_t>& logit_rows) {
  if (logit_rows.empty()) return;
  const int64_t h = c_.hidden_size;
  const auto count = static_cast<int64_t>(logit_rows.size());
  pool_.parallel_for(count, [&](int64_t i, int) {
    const int64_t row = logit_rows[static_cast<size_t>(i)];
    mix_into(ws_.stream.data() + row * h, row, c_.num_snapshots(), weights_.output_attn_res,
             weights_.norm, ws_.head_in.data() + i * h);
  });
  run_products(
      pool_, k_, count,
      {{&weights_.lm_head, ws_.head_in.data(), h, ws_.logits.data(), c_.vocab_size, bf16_}});
}

Status Forward::pad() {
  bytes_ = 0;
  for (int64_t layer = 0; layer < c_.num_hidden_layers; ++layer) {
    if (!weights_.layers[static_cast<size_t>(layer)].is_moe) continue;
    MoeCall call;
    call.layer = layer;
    call.expert_bytes = &bytes_;
    K3_RETURN_IF_ERROR(moe_.run(call));
  }
  return {};
}

Status Forward::run(const std::vector<RowSpan>& spans, const std::vector<int32_t>& tokens,
                    const std::vector<int64_t>& logit_rows) {
  rows_ = static_cast<int64_t>(tokens.size());
  bytes_ = layer_bytes_;
  if (!logit_rows.empty()) bytes_ += weights_.lm_head.rows * weights_.lm_head.row_bytes();
  for (const RowSpan& span : spans) {
    bytes_ += 2 * 4 * (kda_layout_.state_per_slot() + kda_layout_.window_per_slot());
    bytes_ += (span.position + span.tokens) * cache_layout_.layers * cache_layout_.row_bytes();
  }
  embed(tokens);
  int64_t kda_index = 0, mla_index = 0;
  for (int64_t layer = 0; layer < c_.num_hidden_layers; ++layer) {
    const LayerWeights& w = weights_.layers[static_cast<size_t>(layer)];
    attention_input(layer);
    if (w.kind == LayerKind::kKda) {
      kda_layer(w.kda, kda_index++, spans);
    } else {
      mla_layer(w.mla, mla_index++, spans);
    }
    mlp_input(layer);
    if (w.is_moe) {
      K3_RETURN_IF_ERROR(moe_mlp(w.moe, layer));
    } else {
      dense_mlp(w.dense, c_.intermediate_size, ws_.mixed.data(), ws_.delta.data());
    }
    pool_.parallel_for(rows_, [&](int64_t row, int) {
      float* p = ws_.stream.data() + row * c_.hidden_size;
      k_.add(p, ws_.delta.data() + row * c_.hidden_size, p, c_.hidden_size, bf16_);
    });
  }
  head(logit_rows);
  return {};
}

}  // namespace k3
