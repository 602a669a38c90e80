// The routed experts as a plain chain, for tests alone: route metadata, gather, grouped W13, situ,
// grouped W2, weighted combine, each stage for one expert after the other over all rows, with a
// mask for the rows it serves. The oracle of every MegaMoE: the same kernels, none of their
// scheduling.
#pragma once

#include <vector>

#include "cpu/kernels/kernels.h"
#include "model/weights.h"
#include "moe/mega_moe.h"

namespace k3::gate {

class MaskedChain : public MegaMoe {
 public:
  MaskedChain(const ModelWeights* weights, const Kernels* kernels, bool bf16)
      : weights_(*weights), kernels_(*kernels), bf16_(bf16) {}

  Status run(const MoeCall& call) override {
    const ModelConfig& c = weights_.config;
    const int64_t latent = c.routed_expert_hidden_size, inter = c.moe_intermediate_size;
    const int64_t top_k = c.num_experts_per_token;
    const auto& experts = weights_.layers[static_cast<size_t>(call.layer)].moe.experts;
    std::vector<float> slots(static_cast<size_t>(call.live_rows * top_k * latent));
    for (int64_t e = 0; e < weights_.num_local_experts; ++e) {
      std::vector<int64_t> mask;  // assignments that this expert serves
      for (int64_t a = 0; a < call.live_rows * top_k; ++a) {
        if (call.topk_ids[a] == weights_.first_expert + e) mask.push_back(a);
      }
      const ExpertWeights& w = experts[static_cast<size_t>(e)];
      std::vector<float> x;
      for (const int64_t a : mask) {
        const float* row = call.latents + a / top_k * latent;
        x.insert(x.end(), row, row + latent);
      }
      const auto rows = static_cast<int64_t>(mask.size());
      const std::vector<float> gate = product(w.w1, x, rows), up = product(w.w3, x, rows);
      std::vector<float> hidden(static_cast<size_t>(rows * inter));
      kernels_.situ(gate.data(), up.data(), hidden.data(), rows * inter,
                    static_cast<float>(c.situ_beta), static_cast<float>(c.situ_linear_beta), bf16_);
      const std::vector<float> y = product(w.w2, hidden, rows);
      for (size_t i = 0; i < mask.size(); ++i) {
        std::copy(y.begin() + static_cast<int64_t>(i) * latent,
                  y.begin() + static_cast<int64_t>(i + 1) * latent,
                  slots.begin() + mask[i] * latent);
      }
    }
    for (int64_t row = 0; row < call.live_rows; ++row) {
      kernels_.combine(slots.data() + row * top_k * latent, latent, call.topk_weights + row * top_k,
                       top_k, call.combined + row * latent, latent, bf16_);
    }
    return {};
  }

 private:
  std::vector<float> product(const Mxfp4Matrix& w, const std::vector<float>& x, int64_t rows) {
    std::vector<float> y(static_cast<size_t>(rows * w.rows));
    std::vector<float> scratch(static_cast<size_t>(kMxfp4Tile * w.cols));
    GemmArgs a;
    a.x = x.data();
    a.ldx = a.k = w.cols;
    a.rows = rows;
    a.w = w.packed;
    a.w_stride = w.row_bytes();
    a.scale = w.scale;
    a.n_end = w.rows;
    a.y = y.data();
    a.ldy = w.rows;
    a.scratch = scratch.data();
    a.land_bf16 = bf16_;
    if (rows > 0) kernels_.gemm_mxfp4(a);
    return y;
  }

  const ModelWeights& weights_;
  const Kernels& kernels_;
  const bool bf16_;
};

}  // namespace k3::gate
