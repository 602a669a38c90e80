// The router's choice. Included per ISA.
#pragma once

#include "cpu/kernels/elementwise.h"

namespace k3::K3_ISA_NS {

inline void router(const RouterArgs& a) {
  float* sigma = a.scratch;
  float* choice = a.scratch + a.num_experts;
  for_lanes(a.num_experts, [&](int64_t i, int64_t c) {
    const V s = vsigmoid(vload_n(a.logits + i, c));
    vstore_n(sigma + i, s, c);
    vstore_n(choice + i, vadd(s, vload_n(a.bias + i, c)), c);
  });
  // top_k passes over a short array: clearer than a heap and not measurable beside the products. A
  // NaN never wins a comparison; where nothing is left that does, the lowest free index is taken,
  // so that ids stay valid and distinct while the NaN reaches the logits through the weights.
  float sum = 0;
  for (int64_t slot = 0; slot < a.top_k; ++slot) {
    int64_t best = -1;
    for (int64_t e = 0; e < a.num_experts; ++e) {
      bool taken = false;
      if (best >= 0 && !(choice[e] > choice[best])) continue;
      for (int64_t s = 0; s < slot; ++s) taken = taken || a.ids[s] == e;
      if (!taken) best = e;
    }
    a.ids[slot] = static_cast<int32_t>(best);
    a.weights[slot] = sigma[best];
    sum += sigma[best];
  }
  for (int64_t slot = 0; slot < a.top_k; ++slot) {
    a.weights[slot] = a.weights[slot] / (sum + 1e-20f) * a.scaling;
  }
}

}  // namespace k3::K3_ISA_NS
