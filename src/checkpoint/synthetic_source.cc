#include "checkpoint/synthetic_source.h"

#include "checkpoint/manifest.h"
#include "checkpoint/synth.h"

namespace k3 {

Result<std::unique_ptr<SyntheticSource>> SyntheticSource::create(const ModelConfig& config,
                                                                 const RankSpec& rank,
                                                                 uint64_t seed) {
  K3_ASSIGN_OR_RETURN(const LoadPlan plan, plan_load(config, rank));
  auto source = std::make_unique<SyntheticSource>();
  for_each_tensor(config, [&](const TensorSpec& spec) {
    const bool held =
        spec.expert < 0 || (spec.expert >= plan.first_expert && spec.expert < plan.end_expert);
    if (!held) return;
    const auto [at, fresh] = source->tensors_.try_emplace(spec.name);
    at->second = {{nullptr, spec.dtype, spec.shape, spec.bytes, at->first},
                  synth_tensor(config, spec, seed)};
  });
  return source;
}

const TensorView* SyntheticSource::find(std::string_view canonical_name) const {
  const auto it = tensors_.find(std::string(canonical_name));
  return it == tensors_.end() ? nullptr : &it->second.view;
}

void SyntheticSource::read(const TensorView& tensor, int64_t first, int64_t bytes,
                           std::byte* out) const {
  synth_fill(*recipe(tensor), first, bytes, out);
}

const SynthTensor* SyntheticSource::recipe(const TensorView& tensor) const {
  return &tensors_.at(std::string(tensor.name)).recipe;
}

}  // namespace k3
