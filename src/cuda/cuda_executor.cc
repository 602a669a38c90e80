#include "cuda/cuda_executor.h"

#include <algorithm>
#include <cstring>

#include "cuda/device_memory.h"
#include "cuda/device_weights.h"
#include "cuda/forward.h"
#include "cuda/kernels/ceiling.h"
#include "cuda/weight_stager.h"
#include "executor/step_rows.h"

namespace k3::cuda {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Room for the driver's own needs beside what is planned here: graphs, loaded kernels.
constexpr int64_t kReserveBytes = int64_t{256} << 20;

int64_t bucket_of(int64_t rows) {
  for (const int64_t bucket : kBuckets) {
    if (bucket >= rows) return bucket;
  }
  return 0;
}

// Rows of the largest decode step that has a graph.
int64_t largest_bucket(const CudaExecutorOptions& o) {
  const int64_t most = std::min<int64_t>(o.num_slots, o.max_rows);
  return bucket_of(std::min(most, kBuckets[std::size(kBuckets) - 1]));
}

DeviceSizes device_sizes(const ModelConfig& c, const CudaExecutorOptions& o) {
  DeviceSizes s;
  s.num_slots = o.num_slots;
  s.max_rows = std::max(o.max_rows, largest_bucket(o));
  s.max_logit_rows = std::max(o.max_logit_rows, largest_bucket(o));
  s.num_pages = o.num_pages;
  s.page_stride = std::min(ceil_div(c.max_position_embeddings, kPageTokens), o.num_pages);
  s.max_decode_rows = std::min<int64_t>(o.num_slots, o.max_rows);
  return s;
}

}  // namespace

Result<DeviceInfo> device_info() {
  int count = 0;
  if (const cudaError_t e = cudaGetDeviceCount(&count); e != cudaSuccess || count == 0) {
    return Status(ErrorCode::kDevice,
                  cat("--device cuda: no usable card: ",
                      e != cudaSuccess ? cudaGetErrorString(e) : "the driver lists none"));
  }
  cudaDeviceProp p{};
  K3_RETURN_IF_ERROR(cuda_check("cudaGetDeviceProperties", cudaGetDeviceProperties(&p, 0)));
  if (p.major != 9) {
    return Status(ErrorCode::kDevice, cat("--device cuda: ", p.name, " has compute capability ",
                                          p.major, ".", p.minor, ", expected 9.0 (Hopper)"));
  }
  size_t free_bytes = 0, total = 0;
  K3_RETURN_IF_ERROR(cuda_check("cudaMemGetInfo", cudaMemGetInfo(&free_bytes, &total)));
  return DeviceInfo{p.name, p.multiProcessorCount, static_cast<int64_t>(total),
                    std::max<int64_t>(0, static_cast<int64_t>(free_bytes) - kReserveBytes)};
}

struct CudaExecutor::Impl {
  ModelConfig config;
  RankSpec rank;
  int64_t first_expert = 0, local_experts = 0;
  CudaExecutorOptions options;
  DeviceInfo device;
  DeviceSizes sizes;
  InputLayout layout{0, 0};
  std::unique_ptr<DeviceWeights> weights;
  DeviceWorkspace workspace;
  std::unique_ptr<Forward> forward;
  std::unique_ptr<StepRows> rows;
  Stream stream;
  PinnedBuffer inputs, page_table, logits, active_experts;
  Graph graphs[std::size(kBuckets)];
  Forward::Shape last_shape;
  Status failed;  // what has made it unusable
  int64_t layer_bytes = 0;

  Status prepare();
  Status capture_graphs();
  void fill_inputs();
  Status upload_pages();
  Status run(StepResult* result);
  int64_t step_bytes() const;
  const Graph* graph_for(const Forward::Shape& shape) const;
  bool is_decode() const;
};

CudaExecutor::CudaExecutor(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
CudaExecutor::~CudaExecutor() = default;

Result<std::unique_ptr<CudaExecutor>> CudaExecutor::create(
    const ModelWeights& weights, const TensorSource& source, const RankSpec& rank,
    const CudaExecutorOptions& options,
    const std::function<void(int64_t done, int64_t total)>& progress) {
  K3_RETURN_IF_ERROR(check_sizes(options));
  if (!options.policy.bf16()) {
    return invalid_argument("--numerics ", numerics_name(options.policy.numerics),
                            ": the card computes bf16 only");
  }
  if (rank.ep_size != 1) {
    return invalid_argument("--ep-size ", rank.ep_size, ": --device cuda runs one rank");
  }
  auto impl = std::make_unique<Impl>();
  impl->config = weights.config;
  impl->rank = rank;
  impl->first_expert = weights.first_expert;
  impl->local_experts = weights.num_local_experts;
  impl->options = options;
  K3_ASSIGN_OR_RETURN(impl->device, device_info());
  K3_ASSIGN_OR_RETURN(impl->weights, DeviceWeights::load(weights, source, progress));
  K3_RETURN_IF_ERROR(impl->prepare());
  return std::unique_ptr<CudaExecutor>(new CudaExecutor(std::move(impl)));
}

Status CudaExecutor::Impl::prepare() {
  sizes = device_sizes(config, options);
  layout = InputLayout(sizes.max_rows, sizes.max_logit_rows);
  K3_RETURN_IF_ERROR(stream.create());
  K3_RETURN_IF_ERROR(workspace.allocate(config, local_experts, sizes));
  K3_RETURN_IF_ERROR(inputs.allocate("step inputs", layout.size * 4));
  K3_RETURN_IF_ERROR(page_table.allocate("page table", sizes.num_slots * sizes.page_stride * 4));
  K3_RETURN_IF_ERROR(logits.allocate("logits", options.max_logit_rows * config.vocab_size * 4));
  K3_RETURN_IF_ERROR(active_experts.allocate("expert counts", config.num_hidden_layers * 4));
  std::memset(inputs.data(), 0, static_cast<size_t>(inputs.bytes()));
  // No page yet: whatever comes differs.
  std::memset(page_table.data(), 0xff, static_cast<size_t>(page_table.bytes()));
  std::memset(active_experts.data(), 0, static_cast<size_t>(active_experts.bytes()));
  forward = std::make_unique<Forward>(config, first_expert, local_experts, weights.get(),
                                      &workspace, sizes, options.policy, device.num_sms);
  for (int f = 0; f < static_cast<int>(Family::kCount); ++f) {
    const auto family = static_cast<Family>(f);
    if (family != Family::kHead) layer_bytes += forward->family_weight_bytes(family);
  }
  rows = std::make_unique<StepRows>(
      ExecutorLimits{options.num_slots, options.max_rows, options.max_logit_rows, options.num_pages,
                     config.max_position_embeddings, config.vocab_size});
  return options.enforce_eager ? Status() : capture_graphs();
}

Status CudaExecutor::Impl::capture_graphs() {
  // Once without a graph: kernels load lazily, and their attributes are set at the first launch.
  K3_RETURN_IF_ERROR(forward->run({1, 1, 1}, stream.get()));
  K3_RETURN_IF_ERROR(stream.synchronize("first step"));
  const int64_t largest = largest_bucket(options);
  for (size_t i = 0; i < std::size(kBuckets) && kBuckets[i] <= largest; ++i) {
    const int64_t b = kBuckets[i];
    K3_RETURN_IF_ERROR(graphs[i].capture(stream.get(), [&] {
      return forward->run({b, b, b}, stream.get());
    }));
  }
  return {};
}

bool CudaExecutor::Impl::is_decode() const {
  return std::all_of(rows->spans().begin(), rows->spans().end(),
                     [](const RowSpan& s) { return s.tokens == 1; });
}

const Graph* CudaExecutor::Impl::graph_for(const Forward::Shape& shape) const {
  for (size_t i = 0; i < std::size(kBuckets); ++i) {
    if (kBuckets[i] == shape.rows && graphs[i].captured()) return &graphs[i];
  }
  return nullptr;
}

void CudaExecutor::Impl::fill_inputs() {
  auto* in = inputs.as<int32_t>();
  int64_t items = 0;
  int32_t segment = 0;
  for (const RowSpan& s : rows->spans()) {
    in[layout.segment_slot + segment] = s.slot;
    in[layout.segment_position + segment] = static_cast<int32_t>(s.position);
    in[layout.segment_first_row + segment] = static_cast<int32_t>(s.first_row);
    in[layout.segment_tokens + segment] = static_cast<int32_t>(s.tokens);
    ++segment;
    for (int64_t t = 0; t < s.tokens; ++t) {
      const int64_t row = s.first_row + t, position = s.position + t;
      in[layout.token + row] = rows->tokens()[static_cast<size_t>(row)];
      in[layout.slot + row] = s.slot;
      in[layout.position + row] = static_cast<int32_t>(position);
      items += position / (DeviceSizes::kPagesPerSpan * kPageTokens) + 1;
    }
  }
  for (size_t i = 0; i < rows->logit_rows().size(); ++i) {
    in[layout.logit_row + static_cast<int64_t>(i)] = static_cast<int32_t>(rows->logit_rows()[i]);
  }
  in[layout.counts + kLiveRows] = static_cast<int32_t>(rows->num_rows());
  in[layout.counts + kSegments] = segment;
  in[layout.counts + kLogitRows] = static_cast<int32_t>(rows->num_logit_rows());
  in[layout.counts + kSplitAttention] = items <= sizes.attention_items() ? 1 : 0;
}

// Pages that a slot did not have at the last step: one page every 64 tokens, or a new sequence's.
Status CudaExecutor::Impl::upload_pages() {
  auto* table = page_table.as<int32_t>();
  for (const RowSpan& s : rows->spans()) {
    int32_t* row = table + s.slot * sizes.page_stride;
    int64_t first = s.num_pages, end = 0;
    for (int64_t i = 0; i < s.num_pages; ++i) {
      if (row[i] == s.pages[i]) continue;
      first = std::min(first, i);
      end = i + 1;
      row[i] = s.pages[i];
    }
    if (end == 0) continue;
    K3_RETURN_IF_ERROR(cuda_check(
        "page table", cudaMemcpyAsync(workspace.page_table + s.slot * sizes.page_stride + first,
                                      row + first, static_cast<size_t>(end - first) * 4,
                                      cudaMemcpyHostToDevice, stream.get())));
  }
  return {};
}

int64_t CudaExecutor::Impl::step_bytes() const {
  const KdaStateLayout kda(config);
  const LatentCacheLayout cache(config, sizeof(bf16));
  int64_t bytes = layer_bytes;
  if (rows->num_logit_rows() > 0) bytes += forward->family_weight_bytes(Family::kHead);
  for (const RowSpan& s : rows->spans()) {
    bytes += 2 * 4 * (kda.state_per_slot() + kda.window_per_slot());
    bytes += (s.position + s.tokens) * cache.layers * cache.row_bytes();
  }
  for (int64_t l = 0; l < config.num_hidden_layers; ++l) {
    bytes += active_experts.as<int32_t>()[l] * expert_bytes(config);
  }
  return bytes;
}

Status CudaExecutor::Impl::run(StepResult* result) {
  fill_inputs();
  K3_RETURN_IF_ERROR(cuda_check(
      "step inputs",
      cudaMemcpyAsync(workspace.inputs, inputs.data(), static_cast<size_t>(layout.size) * 4,
                      cudaMemcpyHostToDevice, stream.get())));
  K3_RETURN_IF_ERROR(upload_pages());
  const int64_t n = rows->num_rows(), logit_rows = rows->num_logit_rows();
  last_shape = {n, static_cast<int64_t>(rows->spans().size()), logit_rows};
  const int64_t bucket = bucket_of(n);
  const Forward::Shape padded{bucket, bucket, bucket};
  const Graph* graph = bucket > 0 && is_decode() ? graph_for(padded) : nullptr;
  if (graph != nullptr) last_shape = padded;
  K3_RETURN_IF_ERROR(graph != nullptr ? graph->launch(stream.get())
                                      : forward->run(last_shape, stream.get()));
  if (logit_rows > 0) {
    K3_RETURN_IF_ERROR(cuda_check(
        "logits", cudaMemcpyAsync(logits.data(), workspace.logits,
                                  static_cast<size_t>(logit_rows * config.vocab_size) * 4,
                                  cudaMemcpyDeviceToHost, stream.get())));
  }
  const auto moe_layers = config.num_hidden_layers - config.first_k_dense_replace;
  if (moe_layers > 0) {
    // The last of each layer's counts: its experts with work.
    const auto pitch = static_cast<size_t>(local_experts + 1) * 4;
    K3_RETURN_IF_ERROR(cuda_check(
        "expert counts",
        cudaMemcpy2DAsync(active_experts.data(), 4, workspace.expert_counts + local_experts, pitch,
                          4, static_cast<size_t>(moe_layers), cudaMemcpyDeviceToHost,
                          stream.get())));
  }
  K3_RETURN_IF_ERROR(stream.synchronize("step"));
  result->bytes = step_bytes();
  result->num_rows = logit_rows;
  result->vocab_size = config.vocab_size;
  result->logits = {logits.as<float>(), static_cast<size_t>(logit_rows * config.vocab_size)};
  return {};
}

Status CudaExecutor::step(const StepBatch& batch, StepResult* result) {
  Impl& i = *impl_;
  K3_RETURN_IF_ERROR(i.failed);
  K3_RETURN_IF_ERROR(i.rows->lay_out(batch));
  *result = {};
  result->vocab_size = i.config.vocab_size;
  if (i.rows->num_rows() == 0) return {};
  if (Status s = i.run(result); !s.ok()) {
    i.failed = {ErrorCode::kDevice, s.message()};
    return i.failed;
  }
  i.rows->advance();
  return {};
}

std::vector<MemoryItem> CudaExecutor::plan(const ModelConfig& config, const RankSpec& rank,
                                           const CudaExecutorOptions& options) {
  DeviceWorkspace w;
  w.lay_out(config, config.num_experts / rank.ep_size, device_sizes(config, options));
  return {{"state slots", w.state_arena.bytes()},
          {"KV pages", w.page_arena.bytes()},
          {"attention-residual slab", w.slab_arena.bytes()},
          {"scratch", w.scratch_arena.bytes()}};
}

Result<std::vector<MemoryItem>> CudaExecutor::plan_weights(const ModelWeights& weights) {
  K3_ASSIGN_OR_RETURN(const int64_t bytes, DeviceWeights::plan(weights));
  return std::vector<MemoryItem>{{"weights", bytes},
                                 {"staging while loading", DeviceWeights::staging_bytes(weights)}};
}

const ExecutorLimits& CudaExecutor::limits() const { return impl_->rows->limits(); }

std::vector<MemoryItem> CudaExecutor::memory() const {
  const DeviceWorkspace& w = impl_->workspace;
  return {{"weights", impl_->weights->bytes()},
          {"state slots", w.state_arena.bytes()},
          {"KV pages", w.page_arena.bytes()},
          {"attention-residual slab", w.slab_arena.bytes()},
          {"scratch", w.scratch_arena.bytes()}};
}

std::string CudaExecutor::description() const {
  return cat("cuda device=", impl_->device.name, " sms=", impl_->device.num_sms,
             " numerics=", numerics_name(impl_->options.policy.numerics),
             impl_->options.enforce_eager ? " eager" : " graphs");
}

Status CudaExecutor::poison() {
  DeviceWorkspace& w = impl_->workspace;
  for (DeviceArena* arena : {&w.state_arena, &w.page_arena, &w.slab_arena, &w.scratch_arena}) {
    K3_RETURN_IF_ERROR(arena->fill(0xff));
  }
  // Inputs and page table are the executor's own memory of what the card holds.
  return cuda_check("page table", cudaMemcpy(w.page_table, impl_->page_table.data(),
                                             static_cast<size_t>(impl_->page_table.bytes()),
                                             cudaMemcpyHostToDevice));
}

int64_t CudaExecutor::load_bytes() const { return impl_->weights->source_bytes(); }
double CudaExecutor::load_seconds() const { return impl_->weights->load_seconds(); }

Result<double> CudaExecutor::copy_ceiling() {
  constexpr int64_t kBytes = int64_t{256} << 20;
  constexpr int kCopies = 8;
  PinnedBuffer host;
  K3_RETURN_IF_ERROR(host.allocate("copy ceiling", kBytes));
  std::memset(host.data(), 1, static_cast<size_t>(kBytes));
  DeviceArena device;
  device.take<std::byte>(kBytes);
  K3_RETURN_IF_ERROR(device.allocate("copy ceiling"));
  std::byte* to = device.take<std::byte>(kBytes);
  Stopwatch watch;
  double best = 0;
  for (int pass = 0; pass < 3; ++pass) {
    K3_RETURN_IF_ERROR(watch.start(impl_->stream.get()));
    for (int i = 0; i < kCopies; ++i) {
      K3_RETURN_IF_ERROR(
          cuda_check("copy ceiling", cudaMemcpyAsync(to, host.data(), static_cast<size_t>(kBytes),
                                                     cudaMemcpyHostToDevice, impl_->stream.get())));
    }
    K3_ASSIGN_OR_RETURN(const double seconds, watch.stop(impl_->stream.get()));
    best = std::max(best, static_cast<double>(kCopies * kBytes) / seconds);
  }
  return best;
}

Result<double> CudaExecutor::read_ceiling() {
  // The weights themselves if they are far larger than the L2; otherwise memory taken for it.
  constexpr int64_t kBytes = int64_t{8} << 30;
  DeviceArena own;
  const std::byte* data = impl_->weights->data();
  if (impl_->weights->bytes() < kBytes) {
    own.take<std::byte>(kBytes);
    K3_RETURN_IF_ERROR(own.allocate("read ceiling"));
    K3_RETURN_IF_ERROR(own.fill(1));
    data = own.take<std::byte>(kBytes);
  }
  auto* sink = reinterpret_cast<uint32_t*>(impl_->workspace.expert_active);
  Stopwatch watch;
  double best = 0;
  for (const int threads : {256, 512, 1024}) {
    for (const int blocks : {1, 2, 4, 8}) {
      if (blocks * threads > 2048) continue;
      for (int pass = 0; pass < 3; ++pass) {
        K3_RETURN_IF_ERROR(watch.start(impl_->stream.get()));
        K3_RETURN_IF_ERROR(run_read(data, kBytes, blocks * impl_->device.num_sms, threads, sink,
                                    impl_->stream.get()));
        K3_ASSIGN_OR_RETURN(const double seconds, watch.stop(impl_->stream.get()));
        best = std::max(best, static_cast<double>(kBytes) / seconds);
      }
    }
  }
  return best;
}

Result<double> CudaExecutor::time_last_step(int repeats) {
  Impl& i = *impl_;
  const Graph* graph = i.graph_for(i.last_shape);
  Stopwatch watch;
  for (int pass = 0; pass < 2; ++pass) {  // the first warms up
    K3_RETURN_IF_ERROR(watch.start(i.stream.get()));
    for (int r = 0; r < (pass == 0 ? 1 : repeats); ++r) {
      K3_RETURN_IF_ERROR(graph != nullptr ? graph->launch(i.stream.get())
                                          : i.forward->run(i.last_shape, i.stream.get()));
    }
    K3_ASSIGN_OR_RETURN(const double seconds, watch.stop(i.stream.get()));
    if (pass == 1) return seconds / repeats;
  }
  return Status(ErrorCode::kInternal, "unreachable");
}

Result<std::vector<FamilyTime>> CudaExecutor::profile_last_step(int repeats) {
  Impl& i = *impl_;
  std::vector<FamilyTime> times;
  for (int f = 0; f < static_cast<int>(Family::kCount); ++f) {
    const auto family = static_cast<Family>(f);
    FamilyTime t;
    t.name = family_name(family);
    t.bytes = i.forward->family_weight_bytes(family);
    if (family == Family::kExperts) {
      for (int64_t l = 0; l < i.config.num_hidden_layers; ++l) {
        t.bytes += i.active_experts.as<int32_t>()[l] * expert_bytes(i.config);
      }
    }
    Graph graph;
    K3_RETURN_IF_ERROR(graph.capture(i.stream.get(), [&] {
      return i.forward->run_family(family, i.last_shape, i.stream.get(), &t.launches);
    }));
    if (t.launches == 0) continue;
    Stopwatch watch;
    K3_RETURN_IF_ERROR(graph.launch(i.stream.get()));
    K3_RETURN_IF_ERROR(watch.start(i.stream.get()));
    for (int r = 0; r < repeats; ++r) K3_RETURN_IF_ERROR(graph.launch(i.stream.get()));
    K3_ASSIGN_OR_RETURN(const double seconds, watch.stop(i.stream.get()));
    t.seconds = seconds / repeats;
    times.push_back(std::move(t));
  }
  return times;
}

}  // namespace k3::cuda
