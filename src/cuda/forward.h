// The forward pass of one step on the card, layer by layer as in docs/model.md, as a sequence of
// launches on one stream: run eagerly or captured in a graph. CudaExecutor validates a batch, lays
// out its rows and fills the inputs.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/status.h"
#include "cuda/device_memory.h"
#include "cuda/device_weights.h"
#include "cuda/step_view.h"
#include "model/geometry.h"
#include "model/numerics.h"

namespace k3::cuda {

struct DeviceSizes {
  int num_slots = 0;
  int64_t max_rows = 0;        // of a step, buckets included
  int64_t max_logit_rows = 0;  // likewise
  int64_t num_pages = 0;
  int64_t page_stride = 0;      // of the page table: pages one sequence may hold
  int64_t max_decode_rows = 0;  // rows of a step whose segments are all single tokens
  // (row, span) items of split attention: whatever decodes fits (mla.h).
  int64_t attention_items() const { return num_pages / kPagesPerSpan + max_decode_rows; }

  static constexpr int64_t kPagesPerSpan = 4;
};

// Everything a step reads and writes besides weights, on the card. Allocated once.
struct DeviceWorkspace {
  DeviceArena state_arena, page_arena, slab_arena, scratch_arena;

  // Sequence state, model/geometry.h.
  float *kda_state = nullptr, *kda_window = nullptr;
  bf16* latent_cache = nullptr;
  bf16* snapshots = nullptr;  // SnapshotLayout: the attention-residual slab

  // Inputs of a step: one block of int32, and the page table beside it.
  int32_t* inputs = nullptr;
  int32_t* page_table = nullptr;
  StepView view;

  bf16 *stream = nullptr, *mixed = nullptr, *delta = nullptr;  // [rows, hidden]
  bf16* qkv = nullptr;     // KDA [rows, 3 kda_dim]; MLA q [rows, heads * qk_head_dim]
  bf16* gate = nullptr;    // [rows, max(kda_dim, mla_v_dim)]
  bf16* low = nullptr;     // KDA f_a [rows, kda_head_dim]; MLA q_a [rows, q_lora_rank]
  bf16* decay = nullptr;   // KDA f_b [rows, kda_dim]
  bf16* beta = nullptr;    // KDA [rows, kda_num_heads]
  bf16* latent = nullptr;  // MLA kv_a [rows, latent_dim]
  bf16 *q_hi = nullptr, *q_lo = nullptr;  // absorbed query [rows, heads, kv_lora_rank]
  bf16 *o_hi = nullptr, *o_lo = nullptr;  // attended latents, likewise
  float *partial_sums = nullptr, *partial_stats = nullptr;
  bf16* attn = nullptr;            // [rows, max(kda_dim, mla_v_dim)]
  bf16* act = nullptr;             // situ(gate, up) [rows, max(intermediate, shared_intermediate)]
  float* router_logits = nullptr;  // [rows, num_experts]
  bf16 *z = nullptr, *combined = nullptr;  // [rows, routed_expert_hidden_size]
  int32_t* topk_ids = nullptr;
  float* topk_weights = nullptr;
  int32_t *expert_lists = nullptr, *expert_active = nullptr;
  int32_t* expert_counts = nullptr;  // [moe layer][num_local_experts + 1]
  bf16 *expert_h = nullptr, *expert_y = nullptr;
  bf16* head_in = nullptr;  // [logit rows, hidden]
  float* logits = nullptr;  // [logit rows, vocab]

  // Cuts the arrays out of the arenas; counts while those have no memory.
  void lay_out(const ModelConfig& c, int64_t local_experts, const DeviceSizes& sizes);
  Status allocate(const ModelConfig& c, int64_t local_experts, const DeviceSizes& sizes);
};

// The inputs of a step as offsets into one int32 block.
struct InputLayout {
  int64_t counts = 0, token, slot, position, segment_slot, segment_position, segment_first_row,
          segment_tokens, logit_row, size;
  InputLayout(int64_t max_rows, int64_t max_logit_rows);
};

// What a launch belongs to, for the profile of `k3 bench`.
enum class Family {
  kEmbed,
  kMix,
  kKdaIn,
  kKdaLow,
  kKda,
  kMlaIn,
  kMlaPrepare,
  kMlaQ,
  kMlaAbsorb,
  kMlaAttend,
  kMlaExpand,
  kAttentionOut,
  kMoeIn,
  kRouter,
  kExperts,
  kMoeOut,
  kDenseIn,
  kDenseOut,
  kHeadMix,
  kHead,
  kCount,
};
const char* family_name(Family family);

class Forward {
 public:
  Forward(const ModelConfig& config, int64_t first_expert, int64_t local_experts,
          const DeviceWeights* weights, DeviceWorkspace* workspace, const DeviceSizes& sizes,
          NumericsPolicy policy, int num_sms);

  struct Shape {
    int64_t rows = 0, segments = 0, logit_rows = 0;
  };
  // Launches a step over the workspace's inputs. With `only`, the launches of that family alone, as
  // `k3 bench` times them; `launches` counts them.
  Status run(const Shape& shape, cudaStream_t stream);
  Status run_family(Family only, const Shape& shape, cudaStream_t stream, int64_t* launches);
  // Weight bytes that the launches of a family read in one step; routed experts apart.
  int64_t family_weight_bytes(Family family) const;

 private:
  template <typename F>
  void go(Family family, F&& launch) {
    if (!status_.ok() || (only_ != Family::kCount && only_ != family)) return;
    ++launches_;
    status_ = launch();
  }
  Status run_all(const Shape& shape, cudaStream_t stream);
  void attention_input(int64_t layer);
  void mlp_input(int64_t layer);
  void kda_layer(const DeviceKda& w, int64_t kda_index);
  void mla_layer(const DeviceMla& w, int64_t mla_index);
  void dense_mlp(const DeviceLayer& w);
  void moe_mlp(const DeviceMoe& w, int64_t moe_index);
  void head(int64_t logit_rows);
  void product(Family family, const char* name, const PackedMatrix& w, const bf16* x, int64_t ldx,
               bf16* out, int64_t ld);

  const ModelConfig& c_;
  int64_t first_expert_, local_experts_;
  const DeviceWeights& w_;
  DeviceWorkspace& ws_;
  DeviceSizes sizes_;
  NumericsPolicy policy_;
  int num_sms_;
  KdaStateLayout kda_layout_;
  LatentCacheLayout cache_layout_;
  SnapshotLayout snapshot_layout_;
  // Of the run in progress.
  Shape shape_;
  cudaStream_t stream_ = nullptr;
  bool pending_delta_ = false;  // the layer before left a delta to add
  Family only_ = Family::kCount;
  int64_t launches_ = 0;
  Status status_;
};

}  // namespace k3::cuda
