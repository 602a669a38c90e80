#include "cpu/cpu_executor.h"

#include <algorithm>

#include "cpu/ep_moe.h"
#include "cpu/forward.h"
#include "cpu/local_moe.h"
#include "executor/step_rows.h"

namespace k3 {

namespace {

// The ranks behind an EpMoe, as the engine sees them.
class EpPeers : public StepPeers {
 public:
  EpPeers(EpGroup* group, int64_t rank, const EpMoe* moe) : group_(group), rank_(rank), moe_(moe) {}
  bool waiting() const override { return moe_->peer_waits(); }
  void on_change(std::function<void()> call) override { group_->on_ring(rank_, std::move(call)); }

 private:
  EpGroup* group_;
  int64_t rank_;
  const EpMoe* moe_;
};

}  // namespace

struct CpuExecutor::Impl {
  std::shared_ptr<const Checkpoint> checkpoint;
  ModelWeights weights;
  CpuExecutorOptions options;
  const Kernels* kernels = nullptr;
  std::unique_ptr<ThreadPool> pool;
  std::unique_ptr<Workspace> workspace;
  std::unique_ptr<MegaMoe> moe;
  std::unique_ptr<EpPeers> peers;
  RankSpec rank;
  std::unique_ptr<Forward> forward;
  std::unique_ptr<StepRows> rows;
};

namespace {

Status check_options(const CpuExecutorOptions& o) {
  K3_RETURN_IF_ERROR(check_sizes(o));
  if (o.num_threads < 0) return invalid_argument("num_threads: ", o.num_threads, ", expected >= 0");
  return {};
}

}  // namespace

CpuExecutor::CpuExecutor(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
CpuExecutor::~CpuExecutor() = default;

Result<std::unique_ptr<CpuExecutor>> CpuExecutor::create(
    std::shared_ptr<const Checkpoint> checkpoint, const ModelConfig& config, const RankSpec& rank,
    const CpuExecutorOptions& options, std::unique_ptr<MegaMoe> moe) {
  K3_RETURN_IF_ERROR(check_options(options));
  if (config.num_snapshots() > kMaxSnapshots) {
    return checkpoint_error("attn_res_block_size ", config.attn_res_block_size, ": ",
                            config.num_snapshots(), " snapshots, expected at most ", kMaxSnapshots);
  }
  auto impl = std::make_unique<Impl>();
  impl->options = options;
  K3_ASSIGN_OR_RETURN(impl->kernels, select_kernels(options.isa));
  K3_ASSIGN_OR_RETURN(impl->weights, bind_weights(*checkpoint, config, rank));
  impl->checkpoint = std::move(checkpoint);
  impl->pool = std::make_unique<ThreadPool>(options.num_threads > 0 ? options.num_threads
                                                                    : available_cores());
  const int threads = impl->pool->num_threads();
  impl->workspace = std::make_unique<Workspace>(config, options.max_rows);
  K3_RETURN_IF_ERROR(impl->workspace->allocate(config, options.max_rows, options.max_logit_rows,
                                               options.num_slots, options.num_pages, threads,
                                               options.policy.bf16()));
  impl->rank = rank;
  if (moe == nullptr && options.ep != nullptr) {
    if (options.ep->shape().world != rank.ep_size ||
        options.ep->shape().max_rows < options.max_rows) {
      return invalid_argument("expert-parallel group of ", options.ep->shape().world, " ranks, ",
                              options.ep->shape().max_rows, " rows, expected ", rank.ep_size,
                              " ranks, at least ", options.max_rows, " rows");
    }
    K3_ASSIGN_OR_RETURN(std::unique_ptr<EpMoe> ep_moe,
                        EpMoe::create(&impl->weights, impl->pool.get(), impl->kernels,
                                      options.policy, options.ep, rank.ep_rank));
    impl->peers = std::make_unique<EpPeers>(options.ep, rank.ep_rank, ep_moe.get());
    impl->moe = std::move(ep_moe);
  } else if (moe == nullptr) {
    if (rank.ep_size != 1) {
      return invalid_argument("ep_size ", rank.ep_size, " without an expert-parallel group");
    }
    K3_ASSIGN_OR_RETURN(impl->moe, LocalMoe::create(&impl->weights, impl->pool.get(), impl->kernels,
                                                    options.policy, options.max_rows));
  } else {
    impl->moe = std::move(moe);
  }
  impl->forward = std::make_unique<Forward>(&impl->weights, impl->workspace.get(), impl->pool.get(),
                                            impl->kernels, options.policy, impl->moe.get());
  impl->rows = std::make_unique<StepRows>(
      ExecutorLimits{options.num_slots, options.max_rows, options.max_logit_rows, options.num_pages,
                     config.max_position_embeddings, config.vocab_size});
  return std::unique_ptr<CpuExecutor>(new CpuExecutor(std::move(impl)));
}

std::vector<MemoryItem> CpuExecutor::plan(const ModelConfig& config,
                                          const CpuExecutorOptions& options) {
  const KdaStateLayout kda(config);
  const LatentCacheLayout cache(config, options.policy.bf16() ? 2 : 4);
  return {{"state slots", options.num_slots * (kda.state_per_slot() + kda.window_per_slot()) * 4},
          {"KV pages", options.num_pages * cache.page_bytes()}};
}

const ExecutorLimits& CpuExecutor::limits() const { return impl_->rows->limits(); }

std::vector<MemoryItem> CpuExecutor::memory() const {
  std::vector<MemoryItem> items{{"weights (mapped)", impl_->checkpoint->total_bytes()}};
  for (MemoryItem& item : plan(impl_->weights.config, impl_->options)) {
    items.push_back(std::move(item));
  }
  items.push_back({"scratch", impl_->workspace->scratch_bytes()});
  if (impl_->options.ep != nullptr) {
    items.push_back({"expert-parallel slab", SlabLayout(impl_->options.ep->shape()).bytes});
  }
  return items;
}

Status CpuExecutor::step(const StepBatch& batch, StepResult* result) {
  Impl& i = *impl_;
  StepRows& rows = *i.rows;
  K3_RETURN_IF_ERROR(rows.lay_out(batch));
  K3_RETURN_IF_ERROR(rows.num_rows() == 0
                         ? i.forward->pad()
                         : i.forward->run(rows.spans(), rows.tokens(), rows.logit_rows()));
  rows.advance();
  result->bytes = i.forward->bytes();
  result->num_rows = rows.num_logit_rows();
  result->vocab_size = rows.limits().vocab_size;
  result->logits = {i.workspace->logits.data(),
                    static_cast<size_t>(result->num_rows * result->vocab_size)};
  return {};
}

std::string CpuExecutor::description() const {
  return cat(
      "cpu isa=", impl_->kernels->name, " numerics=", numerics_name(impl_->options.policy.numerics),
      " threads=", impl_->pool->num_threads(),
      impl_->rank.ep_size > 1 ? cat(" rank=", impl_->rank.ep_rank, "/", impl_->rank.ep_size) : "");
}

StepPeers* CpuExecutor::peers() { return impl_->peers.get(); }

void CpuExecutor::poison(float value) {
  Workspace& w = *impl_->workspace;
  for (Buffer<float>* b :
       {&w.kda_state, &w.kda_window, &w.stream, &w.snapshots, &w.mixed, &w.delta, &w.qkv, &w.gate,
        &w.decay, &w.latent, &w.q_latent, &w.o_latent, &w.attn, &w.z, &w.combined, &w.logits}) {
    std::fill(b->data(), b->data() + b->size(), value);
  }
  const bool bf16 = impl_->options.policy.bf16();
  const int64_t step = bf16 ? 2 : 4;
  for (int64_t at = 0; at < w.latent_cache.size(); at += step) {
    const uint16_t h = f32_to_bf16(value);
    bf16 ? std::memcpy(w.latent_cache.data() + at, &h, 2)
         : std::memcpy(w.latent_cache.data() + at, &value, 4);
  }
}

}  // namespace k3
