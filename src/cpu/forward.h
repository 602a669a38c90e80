// The forward pass of one step, layer by layer in the vocabulary of the specification
// (docs/model.md). CpuExecutor validates a batch and lays out its rows; Forward computes them.
#pragma once

#include <memory>
#include <vector>

#include "core/thread_pool.h"
#include "cpu/buffer.h"
#include "cpu/kernels/kernels.h"
#include "executor/executor.h"
#include "executor/step_rows.h"
#include "model/geometry.h"
#include "model/numerics.h"
#include "model/weights.h"
#include "moe/mega_moe.h"

namespace k3 {

// Everything a step reads and writes besides weights. Allocated once, for the largest step.
struct Workspace {
  SnapshotLayout snapshot_layout;
  Buffer<float> stream;     // P: [rows, hidden]
  Buffer<float> snapshots;  // attention-residual bank, SnapshotLayout
  Buffer<float> mixed;      // normed mix: what attention or MLP reads, [rows, hidden]
  Buffer<float> delta;      // what attention or MLP returns, [rows, hidden]
  Buffer<float> delta2;     // the shared expert's part, [rows, hidden]
  // Attention. Widths are the larger of the two kinds where they share.
  Buffer<float> qkv;       // KDA [rows, 3 kda_dim]; MLA q [rows, heads * qk_head_dim]
  Buffer<float> gate;      // [rows, max(kda_dim, mla_v_dim)]
  Buffer<float> low;       // KDA f_a [rows, kda_head_dim]; MLA q_a [rows, q_lora_rank]
  Buffer<float> decay;     // KDA f_b [rows, kda_dim]
  Buffer<float> beta;      // KDA [rows, kda_num_heads]
  Buffer<float> latent;    // MLA kv_a [rows, latent_dim]
  Buffer<float> q_latent;  // MLA absorbed query [rows, heads, latent_dim]
  Buffer<float> o_latent;  // MLA sum of latents [rows, heads, kv_lora_rank]
  Buffer<float> attn;      // [rows, max(kda_dim, mla_v_dim)]
  // MLP.
  Buffer<float> mlp_gate, mlp_up;  // [rows, max(intermediate, shared_intermediate)]
  Buffer<float> router_logits;     // [rows, num_experts]
  Buffer<float> z, combined;       // [rows, routed_expert_hidden_size]
  Buffer<int32_t> topk_ids;        // [rows, top_k]
  Buffer<float> topk_weights;      // [rows, top_k]
  Buffer<float> thread_scratch;    // per thread: KDA or router
  int64_t thread_scratch_stride = 0;
  // Head.
  Buffer<float> head_in;  // [logit rows, hidden]
  Buffer<float> logits;   // [logit rows, vocab]
  // Sequence state.
  Buffer<float> kda_state, kda_window;
  Buffer<std::byte> latent_cache;

  Workspace(const ModelConfig& c, int64_t max_rows) : snapshot_layout(c, max_rows) {}
  Status allocate(const ModelConfig& c, int64_t max_rows, int64_t max_logit_rows, int num_slots,
                  int64_t num_pages, int num_threads, bool bf16);
  int64_t scratch_bytes() const;
};

class Forward {
 public:
  Forward(const ModelWeights* weights, Workspace* workspace, ThreadPool* pool,
          const Kernels* kernels, NumericsPolicy policy, MegaMoe* moe);

  // tokens: one per row. logit_rows: the rows whose logits go to workspace.logits, in order.
  Status run(const std::vector<RowSpan>& spans, const std::vector<int32_t>& tokens,
             const std::vector<int64_t>& logit_rows);

  // A step without rows: the MoE calls of every layer and nothing else, so that peers are served.
  Status pad();

  // StepResult::bytes of the last run.
  int64_t bytes() const { return bytes_; }

 private:
  void embed(const std::vector<int32_t>& tokens);
  void mix_into(const float* stream_row, int64_t row, int64_t bank, const AttnResWeights& w,
                const std::vector<float>& norm, float* out);
  void attention_input(int64_t layer);
  void kda_layer(const KdaWeights& w, int64_t kda_index, const std::vector<RowSpan>& spans);
  void mla_layer(const MlaWeights& w, int64_t mla_index, const std::vector<RowSpan>& spans);
  void mlp_input(int64_t layer);
  void dense_mlp(const DenseMlpWeights& w, int64_t width, const float* x, float* out);
  Status moe_mlp(const MoeWeights& w, int64_t layer);
  void head(const std::vector<int64_t>& logit_rows);

  const ModelWeights& weights_;
  const ModelConfig& c_;
  Workspace& ws_;
  ThreadPool& pool_;
  const Kernels& k_;
  NumericsPolicy policy_;
  bool bf16_;
  MegaMoe& moe_;
  KdaStateLayout kda_layout_;
  LatentCacheLayout cache_layout_;
  int64_t rows_ = 0;
  int64_t layer_bytes_ = 0;  // matrices of all layers, routed experts apart
  int64_t bytes_ = 0;
};

}  // namespace k3
