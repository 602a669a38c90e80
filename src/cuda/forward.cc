#include "cuda/forward.h"

#include <algorithm>
#include <cmath>

#include "cuda/kernels/kda.h"
#include "cuda/kernels/mla.h"
#include "cuda/kernels/stream.h"

namespace k3::cuda {
namespace {

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Rows of a stack as consecutive outputs: each part begins where the padding of the one before
// ends.
struct StackOutputs {
  Product& product;
  int64_t next_row = 0;
  void add(int64_t rows, Epilogue epilogue, void* out, int64_t ld) {
    ProductOutput& o = product.out[product.num_outputs++];
    o.first_row = static_cast<int32_t>(next_row);
    o.rows = static_cast<int32_t>(rows);
    o.epilogue = epilogue;
    o.out = out;
    o.ld = ld;
    next_row += padded_rows(rows);
  }
};

}  // namespace

InputLayout::InputLayout(int64_t max_rows, int64_t max_logit_rows) {
  int64_t at = kNumStepCounts;
  const auto array = [&at](int64_t n) { return std::exchange(at, at + n); };
  token = array(max_rows);
  slot = array(max_rows);
  position = array(max_rows);
  segment_slot = array(max_rows);
  segment_position = array(max_rows);
  segment_first_row = array(max_rows);
  segment_tokens = array(max_rows);
  logit_row = array(max_logit_rows);
  size = at;
}

void DeviceWorkspace::lay_out(const ModelConfig& c, int64_t local_experts,
                              const DeviceSizes& sizes) {
  const KdaStateLayout kda(c);
  const LatentCacheLayout cache(c, sizeof(bf16));
  const SnapshotLayout slab(c, sizes.max_rows);
  const int64_t rows = sizes.max_rows, heads = c.num_attention_heads;
  const int64_t top_k = c.num_experts_per_token, latent_width = c.routed_expert_hidden_size;
  const int64_t attn_width = std::max(c.kda_dim(), c.mla_v_dim());

  kda_state = state_arena.take<float>(sizes.num_slots * kda.state_per_slot());
  kda_window = state_arena.take<float>(sizes.num_slots * kda.window_per_slot());
  latent_cache = page_arena.take<bf16>(sizes.num_pages * cache.page_bytes() / 2);
  snapshots = slab_arena.take<bf16>(slab.size());

  DeviceArena& a = scratch_arena;
  const InputLayout in(rows, sizes.max_logit_rows);
  inputs = a.take<int32_t>(in.size);
  page_table = a.take<int32_t>(sizes.num_slots * sizes.page_stride);
  view = {inputs + in.counts,
          inputs + in.token,
          inputs + in.slot,
          inputs + in.position,
          inputs + in.segment_slot,
          inputs + in.segment_position,
          inputs + in.segment_first_row,
          inputs + in.segment_tokens,
          inputs + in.logit_row,
          page_table,
          static_cast<int32_t>(sizes.page_stride)};
  stream = a.take<bf16>(rows * c.hidden_size);
  mixed = a.take<bf16>(rows * c.hidden_size);
  delta = a.take<bf16>(rows * c.hidden_size);
  qkv = a.take<bf16>(rows * std::max(3 * c.kda_dim(), heads * c.qk_head_dim()));
  gate = a.take<bf16>(rows * attn_width);
  low = a.take<bf16>(rows * std::max(c.kda_head_dim, c.q_lora_rank));
  decay = a.take<bf16>(rows * c.kda_dim());
  beta = a.take<bf16>(rows * c.kda_num_heads);
  latent = a.take<bf16>(rows * c.mla_latent_dim());
  const int64_t absorbed = rows * heads * c.kv_lora_rank;
  q_hi = a.take<bf16>(absorbed);
  q_lo = a.take<bf16>(absorbed);
  o_hi = a.take<bf16>(absorbed);
  o_lo = a.take<bf16>(absorbed);
  partial_sums = a.take<float>(sizes.attention_items() * heads * c.kv_lora_rank);
  partial_stats = a.take<float>(sizes.attention_items() * heads * 2);
  attn = a.take<bf16>(rows * attn_width);
  act = a.take<bf16>(rows * std::max(c.intermediate_size, c.shared_intermediate_size()));
  router_logits = a.take<float>(rows * c.num_experts);
  z = a.take<bf16>(rows * latent_width);
  combined = a.take<bf16>(rows * latent_width);
  topk_ids = a.take<int32_t>(rows * top_k);
  topk_weights = a.take<float>(rows * top_k);
  expert_lists = a.take<int32_t>(local_experts * rows);
  expert_active = a.take<int32_t>(local_experts);
  expert_counts = a.take<int32_t>(c.num_hidden_layers * (local_experts + 1));
  expert_h = a.take<bf16>(rows * top_k * c.moe_intermediate_size);
  expert_y = a.take<bf16>(rows * top_k * latent_width);
  head_in = a.take<bf16>(sizes.max_logit_rows * c.hidden_size);
  logits = a.take<float>(sizes.max_logit_rows * c.vocab_size);
}

Status DeviceWorkspace::allocate(const ModelConfig& c, int64_t local_experts,
                                 const DeviceSizes& sizes) {
  lay_out(c, local_experts, sizes);
  K3_RETURN_IF_ERROR(state_arena.allocate("state slots"));
  K3_RETURN_IF_ERROR(page_arena.allocate("KV pages"));
  K3_RETURN_IF_ERROR(slab_arena.allocate("attention-residual slab"));
  K3_RETURN_IF_ERROR(scratch_arena.allocate("scratch"));
  lay_out(c, local_experts, sizes);
  // What no kernel has written yet is zero: a page table names page 0, counts name no work.
  for (DeviceArena* arena : {&state_arena, &page_arena, &slab_arena, &scratch_arena}) {
    K3_RETURN_IF_ERROR(arena->fill(0));
  }
  return {};
}

const char* family_name(Family family) {
  static constexpr const char* kNames[] = {"embed",
                                           "mix + norm",
                                           "KDA q,k,v,g,b,f_a",
                                           "KDA f_b",
                                           "KDA recurrence",
                                           "MLA q_a,kv_a,g",
                                           "MLA norms + page",
                                           "MLA q_b",
                                           "MLA W_UK",
                                           "MLA attend",
                                           "MLA W_UV + gate",
                                           "attention o",
                                           "router,down,shared g,u",
                                           "router top-k",
                                           "experts",
                                           "latent up + shared down",
                                           "dense gate,up",
                                           "dense down",
                                           "head mix",
                                           "lm_head"};
  static_assert(std::size(kNames) == static_cast<size_t>(Family::kCount));
  return kNames[static_cast<size_t>(family)];
}

Forward::Forward(const ModelConfig& config, int64_t first_expert, int64_t local_experts,
                 const DeviceWeights* weights, DeviceWorkspace* workspace, const DeviceSizes& sizes,
                 NumericsPolicy policy, int num_sms)
    : c_(config),
      first_expert_(first_expert),
      local_experts_(local_experts),
      w_(*weights),
      ws_(*workspace),
      sizes_(sizes),
      policy_(policy),
      num_sms_(num_sms),
      kda_layout_(config),
      cache_layout_(config, sizeof(bf16)),
      snapshot_layout_(config, sizes.max_rows) {}

Status Forward::run(const Shape& shape, cudaStream_t stream) {
  only_ = Family::kCount;
  return run_all(shape, stream);
}

Status Forward::run_family(Family only, const Shape& shape, cudaStream_t stream,
                           int64_t* launches) {
  only_ = only;
  const Status status = run_all(shape, stream);
  *launches = launches_;
  return status;
}

Status Forward::run_all(const Shape& shape, cudaStream_t stream) {
  shape_ = shape;
  stream_ = stream;
  status_ = {};
  launches_ = 0;
  pending_delta_ = false;
  go(Family::kEmbed, [&] {
    return run_embed(ws_.view, w_.embed_tokens, c_.hidden_size, static_cast<int32_t>(shape_.rows),
                     ws_.stream, stream_);
  });
  int64_t kda_index = 0, mla_index = 0, moe_index = 0;
  for (int64_t l = 0; l < c_.num_hidden_layers && status_.ok(); ++l) {
    const DeviceLayer& layer = w_.layers[static_cast<size_t>(l)];
    attention_input(l);
    if (c_.layer_kinds[static_cast<size_t>(l)] == LayerKind::kKda) {
      kda_layer(layer.kda, kda_index++);
    } else {
      mla_layer(layer.mla, mla_index++);
    }
    mlp_input(l);
    if (c_.is_moe_layer(l)) {
      moe_mlp(layer.moe, moe_index++);
    } else {
      dense_mlp(layer);
    }
    pending_delta_ = true;
  }
  head(shape.logit_rows);
  return status_;
}

// The stream takes up what the layer before returned; then the mix over the snapshots of the layers
// before this one. Its own snapshot joins after that.
void Forward::attention_input(int64_t layer) {
  go(Family::kMix, [&] {
    const DeviceLayer& w = w_.layers[static_cast<size_t>(layer)];
    Mix m;
    m.stream = ws_.stream;
    m.delta = pending_delta_ ? ws_.delta : nullptr;
    m.snapshots = ws_.snapshots;
    m.snapshot_stride = snapshot_layout_.stride();
    m.bank = static_cast<int32_t>((layer + c_.attn_res_block_size - 1) / c_.attn_res_block_size);
    m.write_snapshot = c_.is_snapshot_layer(layer) ? m.bank : -1;
    m.fold = w.attention_res.fold;
    m.gain = w.attention_res.gain;
    m.eps = c_.rms_norm_eps;
    m.hidden = c_.hidden_size;
    m.rows = static_cast<int32_t>(shape_.rows);
    m.out = ws_.mixed;
    return run_mix(m, stream_);
  });
}

void Forward::mlp_input(int64_t layer) {
  go(Family::kMix, [&] {
    const DeviceLayer& w = w_.layers[static_cast<size_t>(layer)];
    Mix m;
    m.stream = ws_.stream;
    m.delta = ws_.delta;
    m.replace = c_.is_snapshot_layer(layer);
    m.snapshots = ws_.snapshots;
    m.snapshot_stride = snapshot_layout_.stride();
    m.bank = static_cast<int32_t>(layer / c_.attn_res_block_size + 1);
    m.fold = w.mlp_res.fold;
    m.gain = w.mlp_res.gain;
    m.eps = c_.rms_norm_eps;
    m.hidden = c_.hidden_size;
    m.rows = static_cast<int32_t>(shape_.rows);
    m.out = ws_.mixed;
    return run_mix(m, stream_);
  });
}

void Forward::product(Family family, const char* name, const PackedMatrix& w, const bf16* x,
                      int64_t ldx, bf16* out, int64_t ld) {
  go(family, [&] {
    Product p;
    p.in = {w, x, nullptr, ldx};
    p.rows = static_cast<int32_t>(shape_.rows);
    StackOutputs{p}.add(ld, Epilogue::kLand, out, ld);
    return run_product(name, p, stream_);
  });
}

void Forward::kda_layer(const DeviceKda& w, int64_t kda_index) {
  const int64_t dim = c_.kda_dim(), heads = c_.kda_num_heads, d = c_.kda_head_dim;
  go(Family::kKdaIn, [&] {
    Product p;
    p.in = {w.in, ws_.mixed, nullptr, c_.hidden_size};
    p.rows = static_cast<int32_t>(shape_.rows);
    StackOutputs outputs{p};
    for (int i = 0; i < 3; ++i) outputs.add(dim, Epilogue::kLand, ws_.qkv + i * dim, 3 * dim);
    outputs.add(dim, Epilogue::kLand, ws_.gate, dim);
    outputs.add(heads, Epilogue::kLand, ws_.beta, heads);
    outputs.add(d, Epilogue::kLand, ws_.low, d);
    return run_product("KDA q,k,v,g,b,f_a", p, stream_);
  });
  product(Family::kKdaLow, "KDA f_b", w.f_b, ws_.low, d, ws_.decay, dim);
  go(Family::kKda, [&] {
    Kda k;
    k.segments = static_cast<int32_t>(shape_.segments);
    k.heads = static_cast<int32_t>(heads);
    k.head_dim = static_cast<int32_t>(d);
    k.conv_width = static_cast<int32_t>(c_.short_conv_kernel_size);
    k.qkv = ws_.qkv;
    k.gate = ws_.gate;
    k.decay = ws_.decay;
    k.beta = ws_.beta;
    k.beta_ld = heads;
    k.q_conv = w.q_conv;
    k.k_conv = w.k_conv;
    k.v_conv = w.v_conv;
    k.dt_bias = w.dt_bias;
    k.exp_a = w.exp_a;
    k.o_norm = w.o_norm;
    k.gate_lower_bound = c_.gate_lower_bound;
    k.rms_eps = c_.rms_norm_eps;
    k.l2_eps = policy_.l2_norm_eps;
    k.state = ws_.kda_state + kda_layout_.state_at(0, kda_index, 0);
    k.window = ws_.kda_window + kda_layout_.window_at(0, kda_index, 0);
    k.state_per_slot = kda_layout_.state_per_slot();
    k.window_per_slot = kda_layout_.window_per_slot();
    k.out = ws_.attn;
    return run_kda(k, ws_.view, stream_);
  });
  product(Family::kAttentionOut, "KDA o", w.o, ws_.attn, dim, ws_.delta, c_.hidden_size);
}

void Forward::mla_layer(const DeviceMla& w, int64_t mla_index) {
  const int64_t heads = c_.num_attention_heads, rank = c_.kv_lora_rank, qk = c_.qk_head_dim();
  const int64_t q_width = heads * qk, v_width = c_.mla_v_dim();
  const auto rows = static_cast<int32_t>(shape_.rows);
  go(Family::kMlaIn, [&] {
    Product p;
    p.in = {w.in, ws_.mixed, nullptr, c_.hidden_size};
    p.rows = rows;
    StackOutputs outputs{p};
    outputs.add(c_.q_lora_rank, Epilogue::kLand, ws_.low, c_.q_lora_rank);
    outputs.add(c_.mla_latent_dim(), Epilogue::kLand, ws_.latent, c_.mla_latent_dim());
    outputs.add(v_width, Epilogue::kLand, ws_.gate, v_width);
    return run_product("MLA q_a,kv_a,g", p, stream_);
  });
  bf16* cache = ws_.latent_cache + mla_index * cache_layout_.layer_bytes() / 2;
  const int64_t page_stride = cache_layout_.page_bytes() / 2;
  go(Family::kMlaPrepare, [&] {
    MlaPrepare m;
    m.rows = rows;
    m.q_a = ws_.low;
    m.q_gain = w.q_gain;
    m.q_lora_rank = static_cast<int32_t>(c_.q_lora_rank);
    m.latent = ws_.latent;
    m.kv_gain = w.kv_gain;
    m.kv_lora_rank = static_cast<int32_t>(rank);
    m.latent_dim = static_cast<int32_t>(c_.mla_latent_dim());
    m.eps = policy_.lora_norm_eps;
    m.cache = cache;
    m.page_stride = page_stride;
    return run_mla_prepare(m, ws_.view, stream_);
  });
  product(Family::kMlaQ, "MLA q_b", w.q_b, ws_.low, c_.q_lora_rank, ws_.qkv, q_width);
  go(Family::kMlaAbsorb, [&] {
    Product p;
    p.in = {w.w_uk, ws_.qkv, nullptr, q_width};
    p.rows = rows;
    p.batch = static_cast<int32_t>(heads);
    p.w_batch_stride = w.w_uk_stride;
    p.x_batch_stride = qk;
    StackOutputs{p}.add(rank, Epilogue::kSplit, ws_.q_hi, heads * rank);
    p.out[0].out_lo = ws_.q_lo;
    p.out[0].batch_stride = rank;
    return run_product("MLA W_UK", p, stream_);
  });
  go(Family::kMlaAttend, [&] {
    MlaAttend m;
    m.rows = rows;
    m.heads = static_cast<int32_t>(heads);
    m.q_hi = ws_.q_hi;
    m.q_lo = ws_.q_lo;
    m.q = ws_.qkv;
    m.nope = static_cast<int32_t>(c_.qk_nope_head_dim);
    m.rope = static_cast<int32_t>(c_.qk_rope_head_dim);
    m.kv_lora_rank = static_cast<int32_t>(rank);
    m.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(qk)));
    m.cache = cache;
    m.page_stride = page_stride;
    m.partial_sums = ws_.partial_sums;
    m.partial_stats = ws_.partial_stats;
    m.out_hi = ws_.o_hi;
    m.out_lo = ws_.o_lo;
    m.num_blocks = 2 * num_sms_;
    return run_mla_attend(m, ws_.view, stream_);
  });
  go(Family::kMlaExpand, [&] {
    Product p;
    p.in = {w.w_uv, ws_.o_hi, ws_.o_lo, heads * rank};
    p.rows = rows;
    p.batch = static_cast<int32_t>(heads);
    p.w_batch_stride = w.w_uv_stride;
    p.x_batch_stride = rank;
    StackOutputs{p}.add(c_.v_head_dim, Epilogue::kGate, ws_.attn, v_width);
    p.out[0].gate = ws_.gate;
    p.out[0].batch_stride = c_.v_head_dim;
    return run_product("MLA W_UV", p, stream_);
  });
  product(Family::kAttentionOut, "MLA o", w.o, ws_.attn, v_width, ws_.delta, c_.hidden_size);
}

void Forward::dense_mlp(const DeviceLayer& w) {
  const int64_t width = c_.intermediate_size;
  go(Family::kDenseIn, [&] {
    Product p;
    p.in = {w.gate_up, ws_.mixed, nullptr, c_.hidden_size};
    p.rows = static_cast<int32_t>(shape_.rows);
    p.situ_beta = c_.situ_beta;
    p.situ_linear_beta = c_.situ_linear_beta;
    StackOutputs{p}.add(2 * width, Epilogue::kSitu, ws_.act, width);
    return run_product("dense gate,up", p, stream_);
  });
  product(Family::kDenseOut, "dense down", w.down, ws_.act, width, ws_.delta, c_.hidden_size);
}

void Forward::moe_mlp(const DeviceMoe& w, int64_t moe_index) {
  const int64_t latent = c_.routed_expert_hidden_size, shared = c_.shared_intermediate_size();
  const auto rows = static_cast<int32_t>(shape_.rows);
  go(Family::kMoeIn, [&] {
    Product p;
    p.in = {w.in, ws_.mixed, nullptr, c_.hidden_size};
    p.rows = rows;
    p.situ_beta = c_.situ_beta;
    p.situ_linear_beta = c_.situ_linear_beta;
    StackOutputs outputs{p};
    outputs.add(c_.num_experts, Epilogue::kF32, ws_.router_logits, c_.num_experts);
    outputs.add(latent, Epilogue::kLand, ws_.z, latent);
    outputs.add(2 * shared, Epilogue::kSitu, ws_.act, shared);
    return run_product("router,latent down,shared gate,up", p, stream_);
  });
  go(Family::kRouter, [&] {
    Router r;
    r.logits = ws_.router_logits;
    r.bias = w.bias;
    r.num_experts = static_cast<int32_t>(c_.num_experts);
    r.top_k = static_cast<int32_t>(c_.num_experts_per_token);
    r.rows = rows;
    r.scaling = c_.routed_scaling_factor;
    r.live_rows = ws_.view.counts + kLiveRows;
    r.ids = ws_.topk_ids;
    r.weights = ws_.topk_weights;
    return run_router(r, stream_);
  });
  go(Family::kExperts, [&] {
    ExpertsCall e;
    e.bank = w.experts;
    e.first_expert = static_cast<int32_t>(first_expert_);
    e.top_k = static_cast<int32_t>(c_.num_experts_per_token);
    e.rows = rows;
    e.live_rows = ws_.view.counts + kLiveRows;
    e.z = ws_.z;
    e.topk_ids = ws_.topk_ids;
    e.topk_weights = ws_.topk_weights;
    e.norm_gain = w.latent_gain;
    e.rms_eps = c_.rms_norm_eps;
    e.situ_beta = c_.situ_beta;
    e.situ_linear_beta = c_.situ_linear_beta;
    e.max_rows = static_cast<int32_t>(sizes_.max_rows);
    e.lists = ws_.expert_lists;
    e.counts = ws_.expert_counts + moe_index * (local_experts_ + 1);
    e.active = ws_.expert_active;
    e.h = ws_.expert_h;
    e.y = ws_.expert_y;
    e.out = ws_.combined;
    return run_experts(e, stream_);
  });
  go(Family::kMoeOut, [&] {
    Product p;
    p.in = {w.latent_up, ws_.combined, nullptr, latent};
    p.second = {w.shared_down, ws_.act, nullptr, shared};
    p.rows = rows;
    StackOutputs{p}.add(c_.hidden_size, Epilogue::kLand, ws_.delta, c_.hidden_size);
    return run_product("latent up + shared down", p, stream_);
  });
}

void Forward::head(int64_t logit_rows) {
  if (logit_rows == 0) return;
  go(Family::kHeadMix, [&] {
    Mix m;
    m.stream = ws_.stream;
    m.delta = ws_.delta;
    m.snapshots = ws_.snapshots;
    m.snapshot_stride = snapshot_layout_.stride();
    m.bank = static_cast<int32_t>(c_.num_snapshots());
    m.fold = w_.output_res.fold;
    m.gain = w_.output_res.gain;
    m.eps = c_.rms_norm_eps;
    m.hidden = c_.hidden_size;
    m.rows = static_cast<int32_t>(logit_rows);
    m.row_index = ws_.view.logit_row;
    m.num_rows = ws_.view.counts + kLogitRows;
    m.out = ws_.head_in;
    return run_mix(m, stream_);
  });
  go(Family::kHead, [&] {
    Product p;
    p.in = {w_.lm_head, ws_.head_in, nullptr, c_.hidden_size};
    p.rows = static_cast<int32_t>(logit_rows);
    StackOutputs{p}.add(c_.vocab_size, Epilogue::kLandF32, ws_.logits, c_.vocab_size);
    return run_product("lm_head", p, stream_);
  });
}

int64_t Forward::family_weight_bytes(Family family) const {
  const auto bytes = [](const PackedMatrix& m) {
    return m.data == nullptr ? 0 : packed_bytes(m.rows, m.k);
  };
  if (family == Family::kHead) return bytes(w_.lm_head);
  int64_t sum = 0;
  for (const DeviceLayer& l : w_.layers) {
    switch (family) {
      case Family::kKdaIn:
        sum += bytes(l.kda.in);
        break;
      case Family::kKdaLow:
        sum += bytes(l.kda.f_b);
        break;
      case Family::kMlaIn:
        sum += bytes(l.mla.in);
        break;
      case Family::kMlaQ:
        sum += bytes(l.mla.q_b);
        break;
      case Family::kMlaAbsorb:
        sum += c_.num_attention_heads * bytes(l.mla.w_uk);
        break;
      case Family::kMlaExpand:
        sum += c_.num_attention_heads * bytes(l.mla.w_uv);
        break;
      case Family::kAttentionOut:
        sum += bytes(l.kda.o) + bytes(l.mla.o);
        break;
      case Family::kMoeIn:
        sum += bytes(l.moe.in);
        break;
      case Family::kMoeOut:
        sum += bytes(l.moe.latent_up) + bytes(l.moe.shared_down);
        break;
      case Family::kDenseIn:
        sum += bytes(l.gate_up);
        break;
      case Family::kDenseOut:
        sum += bytes(l.down);
        break;
      default:
        break;
    }
  }
  return sum;
}

}  // namespace k3::cuda
