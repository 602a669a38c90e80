#include "checkpoint/load_plan.h"

#include "checkpoint/manifest.h"

namespace k3 {

Status check_rank_spec(const ModelConfig& config, const RankSpec& rank) {
  if (rank.ep_size < 1 || rank.ep_size > config.num_experts ||
      config.num_experts % rank.ep_size != 0) {
    return invalid_argument("expert-parallel size: found ", rank.ep_size,
                            ", expected a divisor of num_experts = ", config.num_experts);
  }
  if (rank.ep_rank < 0 || rank.ep_rank >= rank.ep_size) {
    return invalid_argument("expert-parallel rank: found ", rank.ep_rank, ", expected 0 to ",
                            rank.ep_size - 1);
  }
  return {};
}

Result<LoadPlan> plan_load(const ModelConfig& config, const RankSpec& rank) {
  K3_RETURN_IF_ERROR(check_rank_spec(config, rank));
  LoadPlan plan;
  plan.rank = rank;
  const int64_t per_rank = config.num_experts / rank.ep_size;
  plan.first_expert = rank.ep_rank * per_rank;
  plan.end_expert = plan.first_expert + per_rank;
  for_each_tensor(config, [&](const TensorSpec& spec) {
    if (spec.expert >= 0 && (spec.expert < plan.first_expert || spec.expert >= plan.end_expert)) {
      plan.other_ranks.add(spec.bytes);
      return;
    }
    plan.groups[static_cast<size_t>(spec.group)].add(spec.bytes);
    plan.held.add(spec.bytes);
  });
  return plan;
}

}  // namespace k3
