#include "cpu/ep_moe.h"

#include <algorithm>

namespace k3 {

Result<std::unique_ptr<EpMoe>> EpMoe::create(const ModelWeights* weights, ThreadPool* pool,
                                             const Kernels* kernels, NumericsPolicy policy,
                                             EpGroup* group, int64_t rank) {
  const ModelConfig& c = weights->config;
  const SlabShape& s = group->shape();
  if (s.top_k != c.num_experts_per_token || s.latent != c.routed_expert_hidden_size) {
    return invalid_argument("expert-parallel group: rows of ", s.latent, " and ", s.top_k,
                            " experts, expected ", c.routed_expert_hidden_size, " and ",
                            c.num_experts_per_token);
  }
  std::unique_ptr<EpMoe> moe(new EpMoe);
  moe->group_ = group;
  moe->topology_ = {s.world, rank, c.num_experts};
  if (weights->first_expert != moe->topology_.first_expert() ||
      weights->num_local_experts != moe->topology_.experts_per_rank()) {
    return invalid_argument("expert-parallel rank ", rank, ": weights hold experts from ",
                            weights->first_expert, ", expected from ",
                            moe->topology_.first_expert());
  }
  moe->weights_ = weights;
  moe->pool_ = pool;
  moe->kernels_ = kernels;
  moe->policy_ = policy;
  for (size_t layer = 0; layer < weights->layers.size(); ++layer) {
    if (weights->layers[layer].is_moe) moe->moe_layers_.push_back(static_cast<int64_t>(layer));
  }
  if (moe->moe_layers_.empty()) return invalid_argument("expert parallelism: no MoE layer");
  const int64_t rows = s.world * s.max_rows;
  moe->routes_.reserve(rows * s.top_k, weights->num_local_experts);
  moe->ids_.resize(static_cast<size_t>(rows * s.top_k));
  moe->inbox_.resize(static_cast<size_t>(rows));
  moe->first_.resize(static_cast<size_t>(s.world + 1));
  moe->sent_back_.reserve(static_cast<size_t>(s.max_rows * s.top_k));
  K3_RETURN_IF_ERROR(moe->out_.allocate("expert outputs", rows * s.top_k * s.latent));
  K3_RETURN_IF_ERROR(moe->experts_.init(weights, pool, kernels, policy,
                                        rows * std::min(s.top_k, weights->num_local_experts)));
  return moe;
}

Status EpMoe::lose(const Status& status) {
  group_->fail(status);
  return group_->failure();
}

Status EpMoe::run(const MoeCall& call) {
  if (call.live_rows > group_->shape().max_rows) {
    return invalid_argument("MoE call of ", call.live_rows, " rows, expected at most ",
                            group_->shape().max_rows);
  }
  // In a lost group a peer may still be computing on what this rank would overwrite.
  if (group_->failed()) return group_->failure();
  // The launch-count guard: every step makes one call for each MoE layer, in order, so the number
  // of a call says its layer. Who left one out knows it first.
  const int64_t due = moe_layers_[generation_ % moe_layers_.size()];
  if (call.layer != due) {
    return lose({ErrorCode::kRankLost,
                 cat("rank ", topology_.rank, ", call ", generation_ + 1, ": made for layer ",
                     call.layer, ", expected layer ", due, ": this rank has left out a call")});
  }
  call_ = call;
  ++generation_;
  const int64_t rank = topology_.rank;
  write_dispatch(rank);  // the own rows take the same road
  CallProtocol<EpMoe> protocol(topology_.world, rank, generation_);
  while (!protocol.done()) {
    if (!protocol.ready(*this)) {
      const int64_t peer = protocol.peer();
      const bool in_time = group_->wait(rank, [&] { return protocol.ready(*this); });
      if (group_->failed()) return group_->failure();
      if (!in_time) {
        return lose({ErrorCode::kRankLost,
                     cat("rank ", rank, ", layer ", call.layer, ", call ", generation_, ": no ",
                         ep_phase_name(protocol.phase()), " from rank ", peer, " within ",
                         group_->timeout_seconds(), " s")});
      }
    }
    if (protocol.phase() == EpPhase::kAwaitDispatch) {
      const int64_t theirs = group_->slab(rank).header(protocol.peer()).layer;
      if (theirs != call.layer) {
        return lose({ErrorCode::kRankLost,
                     cat("rank ", rank, ", layer ", call.layer, ", call ", generation_, ": rank ",
                         protocol.peer(), " makes it for layer ", theirs,
                         ": that rank has left out a call")});
      }
    }
    protocol.advance(*this);
  }
  return group_->failed() ? group_->failure() : Status();
}

bool EpMoe::peer_waits() const {
  if (group_->failed()) return true;  // the step will say why
  for (int64_t p = 0; p < topology_.world; ++p) {
    if (p != topology_.rank && dispatch_seen(p) > generation_) return true;
  }
  return false;
}

// Only rows with an expert there travel. A row that pads would be computed, combined by nobody, and
// cost its place in the slab: there is none (live_rows counts real rows only).
void EpMoe::write_dispatch(int64_t peer) {
  const int64_t top_k = group_->shape().top_k, latent = group_->shape().latent;
  Slab& slab = group_->window(topology_.rank, peer);
  int32_t* row_ids = slab.row_ids(topology_.rank);
  int32_t* topk_ids = slab.topk_ids(topology_.rank);
  float* latents = slab.latents(topology_.rank);
  int64_t sent = 0;
  for (int64_t row = 0; row < call_.live_rows; ++row) {
    const int32_t* ids = call_.topk_ids + row * top_k;
    const bool wanted =
        std::any_of(ids, ids + top_k, [&](int32_t e) { return topology_.owner(e) == peer; });
    if (!wanted) continue;
    row_ids[sent] = static_cast<int32_t>(row);
    std::copy(ids, ids + top_k, topk_ids + sent * top_k);
    const float* from = call_.latents + row * latent;
    std::copy(from, from + latent, latents + sent * latent);
    ++sent;
  }
  SlabHeader& header = slab.header(topology_.rank);
  header.layer = call_.layer;
  header.rows = sent;
}

void EpMoe::publish_dispatch(int64_t peer, uint64_t generation) {
  group_->publish_dispatch(topology_.rank, peer, generation);
}

uint64_t EpMoe::dispatch_seen(int64_t peer) const {
  return group_->slab(topology_.rank).flags(peer).dispatched.load(std::memory_order_acquire);
}

void EpMoe::compute() {
  const SlabShape& s = group_->shape();
  Slab& slab = group_->slab(topology_.rank);
  int64_t rows = 0;
  for (int64_t p = 0; p < s.world; ++p) {
    first_[static_cast<size_t>(p)] = rows;
    const int64_t count = slab.header(p).rows;
    const int32_t* ids = slab.topk_ids(p);
    std::copy(ids, ids + count * s.top_k, ids_.data() + rows * s.top_k);
    for (int64_t i = 0; i < count; ++i) {
      inbox_[static_cast<size_t>(rows + i)] = static_cast<int32_t>(p * s.max_rows + i);
    }
    rows += count;
  }
  first_[static_cast<size_t>(s.world)] = rows;
  routes_.build(ids_.data(), rows, s.top_k, weights_->first_expert, weights_->num_local_experts,
                inbox_.data());
  experts_.run(call_.layer, slab.latents(0), routes_, out_.data(), call_.expert_bytes);
  write_return(topology_.rank);
}

void EpMoe::write_return(int64_t peer) {
  const SlabShape& s = group_->shape();
  const int32_t* row_ids = group_->slab(topology_.rank).row_ids(peer);
  float* returned = group_->window(topology_.rank, peer).returned();
  sent_back_.clear();
  const int64_t first = first_[static_cast<size_t>(peer)];
  const int64_t end = first_[static_cast<size_t>(peer + 1)];
  for (int64_t r = first; r < end; ++r) {
    for (int64_t slot = 0; slot < s.top_k; ++slot) {
      const int64_t from = r * s.top_k + slot;
      if (topology_.owner(ids_[static_cast<size_t>(from)]) != topology_.rank) continue;
      const int64_t to = row_ids[r - first] * s.top_k + slot;
      const float* y = out_.data() + from * s.latent;
      std::copy(y, y + s.latent, returned + to * s.latent);
      sent_back_.push_back(static_cast<int32_t>(to));
    }
  }
}

void EpMoe::publish_return(int64_t peer, uint64_t generation) {
  group_->publish_return(topology_.rank, peer, generation, sent_back_);
}

uint64_t EpMoe::return_seen(int64_t peer) const {
  return group_->slab(topology_.rank).flags(peer).returned.load(std::memory_order_acquire);
}

void EpMoe::combine() {
  const int64_t top_k = group_->shape().top_k, latent = group_->shape().latent;
  const float* returned = group_->slab(topology_.rank).returned();
  pool_->parallel_for(call_.live_rows, [&](int64_t row, int) {
    kernels_->combine(returned + row * top_k * latent, latent, call_.topk_weights + row * top_k,
                      top_k, call_.combined + row * latent, latent, policy_.bf16());
  });
}

}  // namespace k3
