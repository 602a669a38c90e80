// The routed experts of one layer as ONE call: live rows' latents, top-k ids and weights in;
// combined latents out. How rows reach the experts, on this rank or another, is the
// implementation's business (docs/ep.md); the result does not depend on it, bit for bit:
//   combined[row] = land( sum over slots, ascending, of w[row, slot] * y ),  y = W2 situ(W1 z, W3
//   z)
#pragma once

#include <cstdint>

#include "core/status.h"

namespace k3 {

struct MoeCall {
  int64_t layer = 0;                    // model layer
  int64_t live_rows = 0;                // 0 is a normal call: an idle rank still makes it
  const float* latents = nullptr;       // [live_rows, latent]
  const int32_t* topk_ids = nullptr;    // [live_rows, top_k], global expert ids, distinct in a row
  const float* topk_weights = nullptr;  // [live_rows, top_k]
  float* combined = nullptr;            // [live_rows, latent]
  int64_t* expert_bytes = nullptr;      // if given: += bytes of the expert weights this rank read
};

class MegaMoe {
 public:
  virtual ~MegaMoe() = default;
  virtual Status run(const MoeCall& call) = 0;
};

}  // namespace k3
