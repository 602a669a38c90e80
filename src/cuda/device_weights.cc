#include "cuda/device_weights.h"

#include <algorithm>
#include <chrono>

#include "cuda/weight_stager.h"

namespace k3::cuda {
namespace {

constexpr int64_t kChunkBytes = int64_t{64} << 20;

// Reads of a stager begin and end at multiples of eight bytes, and packing at whole tiles.
int64_t rows_per_chunk(const Matrix& m, int64_t chunk_bytes) {
  return std::max<int64_t>(kTileRows, chunk_bytes / m.row_bytes() / kTileRows * kTileRows);
}

Status check_dimensions(const ModelConfig& c) {
  const auto multiple = [](const char* key, int64_t value, int64_t of) -> Status {
    if (value % of == 0) return {};
    return checkpoint_error("config.json: ", key, ": ", value,
                            ": the card's kernels expect a multiple of ", of);
  };
  K3_RETURN_IF_ERROR(multiple("hidden_size", c.hidden_size, 8));
  K3_RETURN_IF_ERROR(multiple("intermediate_size", c.intermediate_size, 8));
  K3_RETURN_IF_ERROR(multiple("moe_intermediate_size", c.moe_intermediate_size, 8));
  K3_RETURN_IF_ERROR(multiple("q_lora_rank", c.q_lora_rank, 8));
  K3_RETURN_IF_ERROR(multiple("kv_lora_rank", c.kv_lora_rank, 16));
  K3_RETURN_IF_ERROR(multiple("qk_nope_head_dim", c.qk_nope_head_dim, 16));
  K3_RETURN_IF_ERROR(multiple("qk_rope_head_dim", c.qk_rope_head_dim, 16));
  K3_RETURN_IF_ERROR(multiple("v_head_dim", c.v_head_dim, 8));
  return multiple("linear_attn_config.head_dim", c.kda_head_dim, 32);
}

// A chunk holds at least one expert, one tile of rows, one head.
int64_t chunk_bytes(const ModelConfig& c) {
  const int64_t widest = std::max({c.hidden_size, c.intermediate_size, c.kda_dim(), c.mla_v_dim()});
  const int64_t expert =
      3 * c.moe_intermediate_size * c.routed_expert_hidden_size * 17 / 32 + 6 * 256;
  const int64_t head = (c.qk_nope_head_dim + c.v_head_dim) * c.kv_lora_rank * 2;
  return std::max({kChunkBytes, kTileRows * widest * 2, expert, head});
}

}  // namespace

// Lays the weights out in an arena, and fills it when it has addresses. The two passes are the same
// code, so that what was counted is what is filled.
class WeightLayout {
 public:
  // Without a stager it only counts.
  WeightLayout(const ModelWeights& weights, const TensorSource* source, DeviceArena* arena,
               WeightStager* stager, const LoadProgress& progress, int64_t total = 0)
      : w_(weights),
        c_(weights.config),
        source_(source),
        arena_(*arena),
        stager_(stager),
        progress_(progress),
        total_bytes_(total) {}

  Status run(DeviceWeights* out) {
    out->embed_tokens = raw(w_.embed_tokens);
    out->lm_head = stack({{&w_.lm_head}});
    out->output_res = {vector(w_.output_attn_res.fold), vector(w_.norm)};
    out->layers.resize(w_.layers.size());
    for (size_t l = 0; l < w_.layers.size() && status_.ok(); ++l) {
      layer(w_.layers[l], &out->layers[l]);
    }
    if (stager_ != nullptr && status_.ok()) status_ = stager_->finish();
    if (stager_ != nullptr && status_.ok()) status_ = check_scales();
    return status_;
  }

  int64_t total_bytes() const { return total_bytes_; }  // of the source

 private:
  struct Part {
    const Matrix* matrix = nullptr;
    Interleave interleave = Interleave::kNone;
  };
  // The scales that one flag of the card speaks of.
  using ScaleTensors = std::vector<const TensorView*>;

  template <typename F>
  void attempt(F&& step) {
    if (status_.ok()) status_ = step();
  }

  void layer(const LayerWeights& from, DeviceLayer* to) {
    to->attention_res = {vector(from.self_attention_res.fold), vector(from.input_layernorm)};
    to->mlp_res = {vector(from.mlp_res.fold), vector(from.post_attention_layernorm)};
    if (from.kind == LayerKind::kKda) {
      const KdaWeights& k = from.kda;
      to->kda.in =
          stack({{&k.q_proj}, {&k.k_proj}, {&k.v_proj}, {&k.g_proj}, {&k.b_proj}, {&k.f_a_proj}});
      to->kda.f_b = stack({{&k.f_b_proj}});
      to->kda.o = stack({{&k.o_proj}});
      to->kda.q_conv = vector(k.q_conv);
      to->kda.k_conv = vector(k.k_conv);
      to->kda.v_conv = vector(k.v_conv);
      to->kda.exp_a = vector(k.exp_a);
      to->kda.dt_bias = vector(k.dt_bias);
      to->kda.o_norm = vector(k.o_norm);
    } else {
      const MlaWeights& m = from.mla;
      to->mla.in = stack({{&m.q_a_proj}, {&m.kv_a_proj}, {&m.g_proj}});
      to->mla.q_b = stack({{&m.q_b_proj}});
      heads(m.kv_b_proj, &to->mla);
      to->mla.o = stack({{&m.o_proj}});
      to->mla.q_gain = vector(m.q_a_layernorm);
      to->mla.kv_gain = vector(m.kv_a_layernorm);
    }
    if (from.is_moe) {
      const MoeWeights& m = from.moe;
      to->moe.in = stack({{&m.gate},
                          {&m.routed_expert_down_proj},
                          {&m.shared.gate_proj, Interleave::kGate},
                          {&m.shared.up_proj, Interleave::kUp}});
      to->moe.latent_up = stack({{&m.routed_expert_up_proj}});
      to->moe.shared_down = stack({{&m.shared.down_proj}});
      to->moe.bias = vector(m.e_score_correction_bias);
      to->moe.latent_gain = vector(m.routed_expert_norm);
      to->moe.experts = experts(m.experts);
    } else {
      to->gate_up = stack(
          {{&from.dense.gate_proj, Interleave::kGate}, {&from.dense.up_proj, Interleave::kUp}});
      to->down = stack({{&from.dense.down_proj}});
    }
  }

  const float* vector(const std::vector<float>& v) {
    float* to = arena_.take<float>(static_cast<int64_t>(v.size()));
    if (stager_ == nullptr) return to;
    attempt([&] {
      return cuda_check("cudaMemcpy",
                        cudaMemcpy(to, v.data(), v.size() * sizeof(float), cudaMemcpyHostToDevice));
    });
    return to;
  }

  void staged(int64_t bytes) {
    done_bytes_ += bytes;
    if (progress_) progress_(done_bytes_, total_bytes_);
  }

  const bf16* raw(const Matrix& m) {
    bf16* to = arena_.take<bf16>(m.rows * m.cols);
    total(m);
    if (stager_ == nullptr) return to;
    const int64_t bytes = m.rows * m.row_bytes();
    for (int64_t at = 0; at < bytes && status_.ok(); at += kChunkBytes) {
      const int64_t n = std::min(kChunkBytes, bytes - at);
      attempt([&]() -> Status {
        K3_ASSIGN_OR_RETURN(const auto chunk, stager_->stage({{m.tensor, at, n}}));
        staged(n);
        return cuda_check(
            "cudaMemcpyAsync",
            cudaMemcpyAsync(reinterpret_cast<std::byte*>(to) + at, chunk.piece[0],
                            static_cast<size_t>(n), cudaMemcpyDeviceToDevice, chunk.stream));
      });
    }
    return to;
  }

  void total(const Matrix& m) {
    if (stager_ == nullptr) total_bytes_ += m.rows * m.row_bytes();
  }

  // Parts one below the other; an interleaved pair shares its rows.
  PackedMatrix stack(std::initializer_list<Part> parts) {
    PackedMatrix p;
    p.k = static_cast<int32_t>(parts.begin()->matrix->cols);
    for (const Part& part : parts) {
      total(*part.matrix);
      p.rows +=
          static_cast<int32_t>(part.interleave == Interleave::kNone ? padded_rows(part.matrix->rows)
                                                                    : part.matrix->rows);
    }
    uint4* data = arena_.take<uint4>(packed_bytes(p.rows, p.k) / 16);
    p.data = data;
    if (stager_ == nullptr) return p;
    int64_t first_row = 0;
    for (const Part& part : parts) {
      pack(data, first_row, part);
      if (part.interleave == Interleave::kNone) first_row += padded_rows(part.matrix->rows);
      if (part.interleave == Interleave::kUp) first_row += 2 * part.matrix->rows;
    }
    return p;
  }

  void pack(uint4* to, int64_t first_row, const Part& part) {
    const Matrix& m = *part.matrix;
    const int64_t step = rows_per_chunk(m, kChunkBytes);
    // Source row r of an interleaved matrix falls into stack row 2 r, roughly.
    const int64_t spread = part.interleave == Interleave::kNone ? 1 : 2;
    for (int64_t r = 0; r < m.rows && status_.ok(); r += step) {
      const int64_t n = std::min(step, m.rows - r);
      attempt([&]() -> Status {
        K3_ASSIGN_OR_RETURN(const auto chunk,
                            stager_->stage({{m.tensor, r * m.row_bytes(), n * m.row_bytes()}}));
        staged(n * m.row_bytes());
        const PackSource source{reinterpret_cast<const bf16*>(chunk.piece[0]), n, m.cols, m.cols,
                                1};
        return pack_rows(to, first_row + spread * r, source, part.interleave, chunk.stream);
      });
    }
  }

  // kv_b holds [W_UK; W_UV] head by head. Queries are folded through W_UK, so it is packed
  // transposed.
  void heads(const Matrix& kv_b, DeviceMla* to) {
    const int64_t nope = c_.qk_nope_head_dim, v = c_.v_head_dim, rank = c_.kv_lora_rank;
    const int64_t count = c_.num_attention_heads;
    to->w_uk_stride = packed_bytes(rank, nope) / 16;
    to->w_uv_stride = packed_bytes(v, rank) / 16;
    uint4* w_uk = arena_.take<uint4>(count * to->w_uk_stride);
    uint4* w_uv = arena_.take<uint4>(count * to->w_uv_stride);
    to->w_uk = {w_uk, static_cast<int32_t>(padded_rows(rank)), static_cast<int32_t>(nope)};
    to->w_uv = {w_uv, static_cast<int32_t>(padded_rows(v)), static_cast<int32_t>(rank)};
    total(kv_b);
    if (stager_ == nullptr) return;
    const int64_t head_bytes = (nope + v) * kv_b.row_bytes();
    const int64_t step = std::max<int64_t>(1, kChunkBytes / head_bytes);
    for (int64_t h = 0; h < count && status_.ok(); h += step) {
      const int64_t n = std::min(step, count - h);
      attempt([&]() -> Status {
        K3_ASSIGN_OR_RETURN(const auto chunk,
                            stager_->stage({{kv_b.tensor, h * head_bytes, n * head_bytes}}));
        staged(n * head_bytes);
        const auto* data = reinterpret_cast<const bf16*>(chunk.piece[0]);
        for (int64_t i = 0; i < n; ++i) {
          const bf16* head = data + i * (nope + v) * rank;
          K3_RETURN_IF_ERROR(pack_rows(w_uk + (h + i) * to->w_uk_stride, 0,
                                       {head, rank, nope, 1, rank}, Interleave::kNone,
                                       chunk.stream));
          K3_RETURN_IF_ERROR(pack_rows(w_uv + (h + i) * to->w_uv_stride, 0,
                                       {head + nope * rank, v, rank, rank, 1}, Interleave::kNone,
                                       chunk.stream));
        }
        return {};
      });
    }
  }

  ExpertBank experts(const std::vector<ExpertWeights>& from) {
    const int64_t latent = c_.routed_expert_hidden_size, inter = c_.moe_intermediate_size;
    const auto count = static_cast<int64_t>(from.size());
    const int64_t w13_bytes = expert_w13_bytes(latent, inter);
    const int64_t w2_bytes = expert_w2_bytes(latent, inter);
    std::byte* w13 = arena_.take<std::byte>(count * w13_bytes);
    std::byte* w2 = arena_.take<std::byte>(count * w2_bytes);
    int64_t* flags = arena_.take<int64_t>(2 * count);
    const ExpertBank bank{w13, w2, static_cast<int32_t>(count), static_cast<int32_t>(latent),
                          static_cast<int32_t>(inter)};
    for (const ExpertWeights& e : from) {
      if (stager_ != nullptr) break;
      for (const Mxfp4Matrix* m : {&e.w1, &e.w3, &e.w2}) {
        total_bytes_ += m->packed_tensor->bytes + m->scale_tensor->bytes;
      }
    }
    if (stager_ == nullptr) return bank;
    attempt([&] {
      return cuda_check("cudaMemset",
                        cudaMemset(flags, 0xff, static_cast<size_t>(2 * count) * sizeof(int64_t)));
    });
    for (int64_t e = 0; e < count && status_.ok(); ++e) {
      const ExpertWeights& x = from[static_cast<size_t>(e)];
      attempt([&]() -> Status {
        const auto whole = [](const TensorView* t) { return WeightStager::Piece{t, 0, t->bytes}; };
        K3_ASSIGN_OR_RETURN(const auto chunk,
                            stager_->stage({whole(x.w1.packed_tensor), whole(x.w1.scale_tensor),
                                            whole(x.w3.packed_tensor), whole(x.w3.scale_tensor),
                                            whole(x.w2.packed_tensor), whole(x.w2.scale_tensor)}));
        staged(x.w1.packed_tensor->bytes + x.w1.scale_tensor->bytes + x.w3.packed_tensor->bytes +
               x.w3.scale_tensor->bytes + x.w2.packed_tensor->bytes + x.w2.scale_tensor->bytes);
        K3_RETURN_IF_ERROR(pack_expert_w13(w13 + e * w13_bytes, {chunk.piece[0], chunk.piece[1]},
                                           {chunk.piece[2], chunk.piece[3]}, latent, inter,
                                           flags + 2 * e, chunk.stream));
        return pack_expert_w2(w2 + e * w2_bytes, {chunk.piece[4], chunk.piece[5]}, latent, inter,
                              flags + 2 * e + 1, chunk.stream);
      });
      scales_.push_back({x.w1.scale_tensor, x.w3.scale_tensor});
      scales_.push_back({x.w2.scale_tensor});
    }
    flags_.push_back({flags, 2 * count});
    return bank;
  }

  // A block scale that the decoding cannot hold: finds it in the source and names it.
  Status check_scales() {
    size_t at = 0;
    for (const auto& [flags, count] : flags_) {
      std::vector<int64_t> values(static_cast<size_t>(count));
      K3_RETURN_IF_ERROR(
          cuda_check("cudaMemcpy", cudaMemcpy(values.data(), flags, values.size() * sizeof(int64_t),
                                              cudaMemcpyDeviceToHost)));
      for (const int64_t value : values) {
        const ScaleTensors& tensors = scales_[at++];
        if (value < 0) continue;
        for (const TensorView* t : tensors) K3_RETURN_IF_ERROR(find_bad_scale(*t));
      }
    }
    return {};
  }

  Status find_bad_scale(const TensorView& t) const {
    std::vector<std::byte> bytes(static_cast<size_t>(t.bytes));
    source_->read(t, 0, t.bytes, bytes.data());
    for (size_t i = 0; i < bytes.size(); ++i) {
      const int value = std::to_integer<int>(bytes[i]);
      if (value <= kMaxScaleByte) continue;
      return checkpoint_error("tensor ", t.name, ": byte ", i, ": found block scale ", value,
                              ", the card holds at most ", kMaxScaleByte, " (2^",
                              kMaxScaleByte - 127, ")");
    }
    return {};
  }

  const ModelWeights& w_;
  const ModelConfig& c_;
  const TensorSource* source_;
  DeviceArena& arena_;
  WeightStager* stager_;
  const LoadProgress& progress_;
  Status status_;
  int64_t done_bytes_ = 0, total_bytes_ = 0;
  std::vector<std::pair<const int64_t*, int64_t>> flags_;  // of each layer: two an expert
  std::vector<ScaleTensors> scales_;                       // of each flag
};

Result<int64_t> DeviceWeights::plan(const ModelWeights& weights) {
  K3_RETURN_IF_ERROR(check_dimensions(weights.config));
  DeviceWeights counted;
  const LoadProgress none;
  K3_RETURN_IF_ERROR(WeightLayout(weights, nullptr, &counted.arena_, nullptr, none).run(&counted));
  return counted.arena_.bytes();
}

int64_t DeviceWeights::staging_bytes(const ModelWeights& weights) {
  return WeightStager::kChunks * chunk_bytes(weights.config);
}

Result<std::unique_ptr<DeviceWeights>> DeviceWeights::load(const ModelWeights& weights,
                                                           const TensorSource& source,
                                                           const LoadProgress& progress) {
  K3_RETURN_IF_ERROR(check_dimensions(weights.config));
  const auto start = std::chrono::steady_clock::now();
  auto out = std::make_unique<DeviceWeights>();
  WeightLayout count(weights, nullptr, &out->arena_, nullptr, progress);
  K3_RETURN_IF_ERROR(count.run(out.get()));
  K3_RETURN_IF_ERROR(out->arena_.allocate("weights"));
  WeightStager stager(source);
  K3_RETURN_IF_ERROR(stager.create(chunk_bytes(weights.config)));
  WeightLayout fill(weights, &source, &out->arena_, &stager, progress, count.total_bytes());
  K3_RETURN_IF_ERROR(fill.run(out.get()));
  out->source_bytes_ = stager.staged_bytes();
  out->load_seconds_ =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return out;
}

}  // namespace k3::cuda
