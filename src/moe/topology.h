// Which rank owns which expert: contiguous blocks, rank r of N holds [r E / N, (r + 1) E / N).
#pragma once

#include <cstdint>

namespace k3 {

struct Topology {
  int64_t world = 1;
  int64_t rank = 0;
  int64_t num_experts = 1;  // a multiple of world

  int64_t experts_per_rank() const { return num_experts / world; }
  int64_t first_expert() const { return rank * experts_per_rank(); }
  int64_t owner(int64_t expert) const { return expert / experts_per_rank(); }
};

}  // namespace k3
