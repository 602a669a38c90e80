#include "cpu/cpu_executor.h"

#include <algorithm>

#include "cpu/ep_moe.h"
#include "cpu/forward.h"
#include "cpu/local_moe.h"

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
  ExecutorLimits limits;
  std::vector<int64_t> slot_position;            // next position of each slot
  std::vector<uint64_t> page_stamp, slot_stamp;  // step in which each was last named
  uint64_t step_number = 0;
  // Reused from step to step.
  std::vector<RowSpan> spans;
  std::vector<int32_t> tokens;
  std::vector<int64_t> logit_rows;

  Status check(const Segment& s, size_t index);
};

namespace {

Status check_options(const CpuExecutorOptions& o) {
  const auto positive = [](const char* what, int64_t v) -> Status {
    if (v > 0) return {};
    return invalid_argument(what, ": ", v, ", expected at least 1");
  };
  K3_RETURN_IF_ERROR(positive("num_slots", o.num_slots));
  K3_RETURN_IF_ERROR(positive("max_rows", o.max_rows));
  K3_RETURN_IF_ERROR(positive("max_logit_rows", o.max_logit_rows));
  K3_RETURN_IF_ERROR(positive("num_pages", o.num_pages));
  if (o.num_threads < 0) return invalid_argument("num_threads: ", o.num_threads, ", expected >= 0");
  return {};
}

}  // namespace

Status CpuExecutor::Impl::check(const Segment& s, size_t index) {
  const auto bad = [index](const auto&... what) {
    return invalid_argument("segment ", index, ": ", what...);
  };
  if (s.slot < 0 || s.slot >= limits.num_slots) {
    return bad("slot ", s.slot, ", expected [0, ", limits.num_slots, ")");
  }
  if (slot_stamp[static_cast<size_t>(s.slot)] == step_number) {
    return bad("slot ", s.slot, " appears twice in a step");
  }
  slot_stamp[static_cast<size_t>(s.slot)] = step_number;
  const auto count = static_cast<int64_t>(s.tokens.size());
  if (count == 0) return bad("no tokens");
  const int64_t at = slot_position[static_cast<size_t>(s.slot)];
  if (s.position != 0 && s.position != at) {
    return bad("position ", s.position, ", expected 0 or ", at, " where slot ", s.slot, " stands");
  }
  const int64_t end = s.position + count;
  if (end > limits.max_positions) {
    return bad("tokens end at position ", end, ", the model's context is ", limits.max_positions);
  }
  for (const int32_t t : s.tokens) {
    if (t < 0 || t >= limits.vocab_size) {
      return bad("token ", t, ", expected [0, ", limits.vocab_size, ")");
    }
  }
  const int64_t pages = (end + kPageTokens - 1) / kPageTokens;
  if (static_cast<int64_t>(s.pages.size()) < pages) {
    return bad(s.pages.size(), " pages, expected at least ", pages, " for ", end, " tokens");
  }
  for (int64_t i = 0; i < pages; ++i) {
    const int32_t page = s.pages[static_cast<size_t>(i)];
    if (page < 0 || page >= limits.num_pages) {
      return bad("page ", page, ", expected [0, ", limits.num_pages, ")");
    }
    if (page_stamp[static_cast<size_t>(page)] == step_number) {
      return bad("page ", page, " appears twice in a step");
    }
    page_stamp[static_cast<size_t>(page)] = step_number;
  }
  return {};
}

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
  impl->limits = {options.num_slots,
                  options.max_rows,
                  options.max_logit_rows,
                  options.num_pages,
                  config.max_position_embeddings,
                  config.vocab_size};
  impl->slot_position.assign(static_cast<size_t>(options.num_slots), 0);
  impl->slot_stamp.assign(static_cast<size_t>(options.num_slots), 0);
  impl->page_stamp.assign(static_cast<size_t>(options.num_pages), 0);
  return std::unique_ptr<CpuExecutor>(new CpuExecutor(std::move(impl)));
}

std::vector<MemoryItem> CpuExecutor::plan(const ModelConfig& config,
                                          const CpuExecutorOptions& options) {
  const KdaStateLayout kda(config);
  const LatentCacheLayout cache(config, options.policy.bf16() ? 2 : 4);
  return {{"state slots", options.num_slots * (kda.state_per_slot() + kda.window_per_slot()) * 4},
          {"KV pages", options.num_pages * cache.page_bytes()}};
}

const ExecutorLimits& CpuExecutor::limits() const { return impl_->limits; }

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
  ++i.step_number;
  i.spans.clear();
  i.tokens.clear();
  i.logit_rows.clear();
  for (size_t s = 0; s < batch.segments.size(); ++s) {
    const Segment& segment = batch.segments[s];
    K3_RETURN_IF_ERROR(i.check(segment, s));
    const auto first = static_cast<int64_t>(i.tokens.size());
    const auto count = static_cast<int64_t>(segment.tokens.size());
    i.spans.push_back({segment.slot, segment.position, first, count, segment.pages.data()});
    i.tokens.insert(i.tokens.end(), segment.tokens.begin(), segment.tokens.end());
    if (segment.logits == Logits::kLast) i.logit_rows.push_back(first + count - 1);
    if (segment.logits == Logits::kAll) {
      for (int64_t t = 0; t < count; ++t) i.logit_rows.push_back(first + t);
    }
  }
  const auto rows = static_cast<int64_t>(i.tokens.size());
  if (rows > i.limits.max_rows) {
    return invalid_argument("step of ", rows, " rows, expected at most ", i.limits.max_rows);
  }
  const auto logit_rows = static_cast<int64_t>(i.logit_rows.size());
  if (logit_rows > i.limits.max_logit_rows) {
    return invalid_argument("step with ", logit_rows, " rows of logits, expected at most ",
                            i.limits.max_logit_rows);
  }
  K3_RETURN_IF_ERROR(rows == 0 ? i.forward->pad()
                               : i.forward->run(i.spans, i.tokens, i.logit_rows));
  for (const RowSpan& span : i.spans) {
    i.slot_position[static_cast<size_t>(span.slot)] = span.position + span.tokens;
  }
  result->bytes = i.forward->bytes();
  result->num_rows = logit_rows;
  result->vocab_size = i.limits.vocab_size;
  result->logits = {i.workspace->logits.data(),
                    static_cast<size_t>(logit_rows * i.limits.vocab_size)};
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
