// What a rank will hold, in bytes, known from the config and the headers before one payload byte is
// read. Also where the sizes of per-sequence state come from.
#pragma once

#include <array>
#include <cstdint>

namespace k3 {

enum class TensorGroup {
  kEmbedding,
  kKdaAttention,
  kMlaAttention,
  kNorms,  // layer norms, attention-residual norms and projections, final norm
  kRouter,
  kLatent,  // routed_expert_down_proj, _norm, _up_proj
  kSharedExperts,
  kRoutedExperts,
  kDenseMlp,
  kHead,
};
inline constexpr int kNumTensorGroups = 10;

}  // namespace k3
