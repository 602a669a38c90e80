// A model's weights without files: every tensor of the config by its recipe (synth.h), the same
// bytes that `k3 synth` writes. Nothing is held in memory; a device fills itself by recipe.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>

#include "checkpoint/load_plan.h"
#include "checkpoint/tensor_source.h"
#include "config/model_config.h"
#include "core/status.h"

namespace k3 {

class SyntheticSource : public TensorSource {
 public:
  // Errors: as check_rank_spec.
  static Result<std::unique_ptr<SyntheticSource>> create(const ModelConfig& config,
                                                         const RankSpec& rank, uint64_t seed);
  const TensorView* find(std::string_view canonical_name) const override;
  void read(const TensorView& tensor, int64_t first, int64_t bytes, std::byte* out) const override;
  const SynthTensor* recipe(const TensorView& tensor) const override;

 private:
  struct Entry {
    TensorView view;
    SynthTensor recipe;
  };
  std::unordered_map<std::string, Entry> tensors_;  // views name their keys
};

}  // namespace k3
