#include "cpu/local_moe.h"

#include <algorithm>

#include "model/geometry.h"

namespace k3 {
namespace {

constexpr int64_t kColumns = 32;   // output columns of one work item
constexpr int64_t kRowChunk = 64;  // rows of an expert whose gate and up tiles are held at once

}  // namespace

void ExpertRoutes::reserve(int64_t max_assignments, int64_t num_experts) {
  offset_.resize(static_cast<size_t>(num_experts + 1));
  groups_.reserve(static_cast<size_t>(num_experts));
  assignments_.resize(static_cast<size_t>(max_assignments));
  rows_.resize(static_cast<size_t>(max_assignments));
}

void ExpertRoutes::build(const int32_t* topk_ids, int64_t rows, int64_t top_k, int64_t first_expert,
                         int64_t num_experts) {
  std::fill(offset_.begin(), offset_.end(), 0);
  const int64_t n = rows * top_k;
  for (int64_t a = 0; a < n; ++a) {
    const int64_t e = topk_ids[a] - first_expert;
    if (e >= 0 && e < num_experts) ++offset_[static_cast<size_t>(e + 1)];
  }
  groups_.clear();
  for (int64_t e = 0; e < num_experts; ++e) {
    const auto i = static_cast<size_t>(e);
    const int64_t begin = offset_[i];
    offset_[i + 1] += begin;
    if (offset_[i + 1] > begin) groups_.push_back({e, begin, offset_[i + 1]});
  }
  // offset_[e] walks from the begin of expert e to its end while assignments are placed.
  for (int64_t a = 0; a < n; ++a) {
    const int64_t e = topk_ids[a] - first_expert;
    if (e < 0 || e >= num_experts) continue;
    const auto at = static_cast<size_t>(offset_[static_cast<size_t>(e)]++);
    assignments_[at] = static_cast<int32_t>(a);
    rows_[at] = static_cast<int32_t>(a / top_k);
  }
}

Result<std::unique_ptr<LocalMoe>> LocalMoe::create(const ModelWeights* weights, ThreadPool* pool,
                                                   const Kernels* kernels, NumericsPolicy policy,
                                                   int64_t max_rows) {
  std::unique_ptr<LocalMoe> moe(new LocalMoe);
  const ModelConfig& c = weights->config;
  moe->ranks_ = {weights};
  moe->pool_ = pool;
  moe->kernels_ = kernels;
  moe->policy_ = policy;
  moe->max_rows_ = max_rows;
  const int64_t assignments = max_rows * c.num_experts_per_token;
  moe->routes_.reserve(assignments, weights->num_local_experts);
  const int64_t widest = std::max(c.moe_intermediate_size, c.routed_expert_hidden_size);
  moe->scratch_per_thread_ = kMxfp4Tile * widest + 2 * kRowChunk * kColumns;
  K3_RETURN_IF_ERROR(
      moe->hidden_.allocate("expert hidden rows", assignments * c.moe_intermediate_size));
  K3_RETURN_IF_ERROR(
      moe->out_.allocate("expert output rows", assignments * c.routed_expert_hidden_size));
  K3_RETURN_IF_ERROR(
      moe->scratch_.allocate("expert scratch", pool->num_threads() * moe->scratch_per_thread_));
  return moe;
}

int64_t LocalMoe::scratch_bytes() const {
  return hidden_.bytes() + out_.bytes() + scratch_.bytes();
}

Status LocalMoe::run(const MoeCall& call) {
  for (const ModelWeights* weights : ranks_) run_rank(*weights, call);
  const ModelConfig& c = ranks_[0]->config;
  const int64_t latent = c.routed_expert_hidden_size, top_k = c.num_experts_per_token;
  pool_->parallel_for(call.live_rows, [&](int64_t row, int) {
    kernels_->combine(out_.data() + row * top_k * latent, latent, call.topk_weights + row * top_k,
                      top_k, call.combined + row * latent, latent, policy_.bf16());
  });
  return {};
}

// Outputs of the experts that `weights` holds, at [row * top_k + slot] of out_.
void LocalMoe::run_rank(const ModelWeights& weights, const MoeCall& call) {
  const ModelConfig& c = weights.config;
  const std::vector<ExpertWeights>& experts =
      weights.layers[static_cast<size_t>(call.layer)].moe.experts;
  const int64_t inter = c.moe_intermediate_size;
  const int64_t latent = c.routed_expert_hidden_size;
  const int64_t top_k = c.num_experts_per_token;
  const bool bf16 = policy_.bf16();
  routes_.build(call.topk_ids, call.live_rows, top_k, weights.first_expert,
                weights.num_local_experts);
  const auto& groups = routes_.groups();
  const auto num_groups = static_cast<int64_t>(groups.size());

  if (call.expert_bytes != nullptr) *call.expert_bytes += num_groups * expert_bytes(c);

  const auto product = [&](const Mxfp4Matrix& w, int64_t n_begin, int64_t n_end, float* tile) {
    GemmArgs a;
    a.k = w.cols;
    a.w = w.packed;
    a.w_stride = w.row_bytes();
    a.scale = w.scale;
    a.n_begin = n_begin;
    a.n_end = n_end;
    a.scratch = tile;
    a.land_bf16 = bf16;
    return a;
  };

  const int64_t inter_blocks = (inter + kColumns - 1) / kColumns;
  pool_->parallel_for(num_groups * inter_blocks, [&](int64_t item, int thread) {
    const ExpertRoutes::Group& group = groups[static_cast<size_t>(item / inter_blocks)];
    const ExpertWeights& e = experts[static_cast<size_t>(group.expert)];
    const int64_t n_begin = item % inter_blocks * kColumns;
    const int64_t n_end = std::min(n_begin + kColumns, inter);
    float* tile = scratch_.data() + thread * scratch_per_thread_;
    float* gate = tile + kMxfp4Tile * std::max(inter, latent);
    float* up = gate + kRowChunk * kColumns;
    for (int64_t begin = group.begin; begin < group.end; begin += kRowChunk) {
      const int64_t rows = std::min(kRowChunk, group.end - begin);
      for (const bool is_gate : {true, false}) {
        GemmArgs a = product(is_gate ? e.w1 : e.w3, n_begin, n_end, tile);
        a.x = call.latents;
        a.ldx = latent;
        a.x_index = routes_.rows().data() + begin;
        a.rows = rows;
        a.y = is_gate ? gate : up;
        a.ldy = kColumns;
        a.y_column = n_begin;
        kernels_->gemm_mxfp4(a);
      }
      for (int64_t r = 0; r < rows; ++r) {
        kernels_->situ(gate + r * kColumns, up + r * kColumns,
                       hidden_.data() + (begin + r) * inter + n_begin, n_end - n_begin, c.situ_beta,
                       c.situ_linear_beta, bf16);
      }
    }
  });

  const int64_t latent_blocks = (latent + kColumns - 1) / kColumns;
  pool_->parallel_for(num_groups * latent_blocks, [&](int64_t item, int thread) {
    const ExpertRoutes::Group& group = groups[static_cast<size_t>(item / latent_blocks)];
    const int64_t n_begin = item % latent_blocks * kColumns;
    GemmArgs a = product(experts[static_cast<size_t>(group.expert)].w2, n_begin,
                         std::min(n_begin + kColumns, latent),
                         scratch_.data() + thread * scratch_per_thread_);
    a.x = hidden_.data() + group.begin * inter;
    a.ldx = inter;
    a.rows = group.end - group.begin;
    a.y = out_.data();
    a.ldy = latent;
    a.y_index = routes_.assignments().data() + group.begin;
    kernels_->gemm_mxfp4(a);
  });
}

}  // namespace k3
