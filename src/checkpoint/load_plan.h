// What a rank will hold, in bytes, known from the config (and confirmed by the headers) before one
// payload byte is read.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "config/model_config.h"
#include "core/status.h"

namespace k3 {

// Expert parallelism in contiguous blocks: of E experts rank r of N holds [r*E/N, (r+1)*E/N); all
// other tensors are held by every rank. N must divide E.
struct RankSpec {
  int64_t ep_size = 1;
  int64_t ep_rank = 0;
};

enum class TensorGroup {
  kEmbedding,
  kKdaAttention,
  kMlaAttention,
  kNorms,   // layer norms, attention-residual norms and projections, final norm
  kRouter,  // gate and its selection bias
  kLatent,  // routed_expert_down_proj, _norm, _up_proj
  kSharedExperts,
  kRoutedExperts,
  kDenseMlp,
  kHead,
};
inline constexpr int kNumTensorGroups = 10;
// "embedding", "KDA attention", ...
const char* tensor_group_name(TensorGroup group);

struct TensorCount {
  int64_t tensors = 0;
  int64_t bytes = 0;
  void add(int64_t tensor_bytes) {
    ++tensors;
    bytes += tensor_bytes;
  }
  bool operator==(const TensorCount&) const = default;
};

struct LoadPlan {
  RankSpec rank;
  int64_t first_expert = 0;  // this rank's routed experts are [first_expert, end_expert)
  int64_t end_expert = 0;
  std::array<TensorCount, kNumTensorGroups> groups;  // held by this rank
  TensorCount held;                                  // their sum
  TensorCount other_ranks;                           // routed experts of the other ranks
  // Found in the checkpoint, not part of this model; bytes count only where a header was read. Zero
  // in a plan made from the config alone.
  TensorCount skipped_layers;  // layers cut off by truncate_layers()
  TensorCount skipped_vision;  // vision_tower., mm_projector.
  // Things a user should know that are no errors ("model.safetensors is ignored: ...").
  std::vector<std::string> notes;

  const TensorCount& group(TensorGroup g) const { return groups[static_cast<size_t>(g)]; }
};

// Errors: kInvalidArgument if ep_size does not divide num_experts or ep_rank is outside it.
Status check_rank_spec(const ModelConfig& config, const RankSpec& rank);

// The plan as the config implies it; no file is read. Errors: as check_rank_spec.
Result<LoadPlan> plan_load(const ModelConfig& config, const RankSpec& rank);

}  // namespace k3
