// A small routed-expert model and calls on it, for the gates of LocalMoe and EpMoe.
#pragma once

#include <array>
#include <cmath>
#include <vector>

#include "cpu/stage_gate.h"
#include "model/weights.h"

namespace k3::gate {

inline constexpr int64_t kLatent = 96, kInter = 64, kExperts = 6, kTopK = 3;

struct Matrix4 {
  std::vector<std::byte> packed, scale;
  std::vector<float> value;  // [rows, cols], from the format's definition
};

inline Matrix4 random_matrix(Random& random, int64_t rows, int64_t cols, int lo, int hi,
                             bool swapped = false) {
  const double magnitude[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  Matrix4 m{random.bytes(rows * cols / 2), random.bytes(rows * cols / 32, lo, hi), {}};
  for (int64_t i = 0; i < rows * cols; ++i) {
    const auto byte = static_cast<unsigned>(m.packed[static_cast<size_t>(i / 2)]);
    const unsigned code = (i % 2 == 1) != swapped ? byte >> 4 : byte & 15;
    const int s = static_cast<int>(m.scale[static_cast<size_t>(i / 32)]);
    const double v = std::ldexp(magnitude[code & 7], s - 127);
    m.value.push_back(static_cast<float>(code & 8 ? -v : v));
  }
  return m;
}

struct Model {
  ModelWeights weights;
  std::vector<std::array<Matrix4, 3>> experts;  // w1, w3, w2

  explicit Model(uint32_t seed) {
    Random random(seed);
    ModelConfig& c = weights.config;
    c.num_hidden_layers = 1;
    c.first_k_dense_replace = 0;
    c.num_experts = kExperts;
    c.num_experts_per_token = kTopK;
    c.moe_intermediate_size = kInter;
    c.routed_expert_hidden_size = kLatent;
    c.situ_beta = 4;
    c.situ_linear_beta = 25;
    weights.num_local_experts = kExperts;
    weights.layers.resize(1);
    weights.layers[0].is_moe = true;
    weights.layers[0].moe.experts.resize(kExperts);
    experts.resize(kExperts);
    for (size_t e = 0; e < kExperts; ++e) {
      // Expert 4 has scales from 2^-127 to 2^53, expert 5 the smallest alone, the others the
      // release's range.
      const int lo = e >= 4 ? 0 : 118, hi = e == 4 ? 180 : e == 5 ? 3 : 125;
      experts[e] = {random_matrix(random, kInter, kLatent, lo, hi),
                    random_matrix(random, kInter, kLatent, lo, hi),
                    random_matrix(random, kLatent, kInter, lo, hi)};
      ExpertWeights& w = weights.layers[0].moe.experts[e];
      const auto bind = [](const Matrix4& m, int64_t rows, int64_t cols) {
        return Mxfp4Matrix{m.packed.data(), m.scale.data(), rows, cols};
      };
      w.w1 = bind(experts[e][0], kInter, kLatent);
      w.w3 = bind(experts[e][1], kInter, kLatent);
      w.w2 = bind(experts[e][2], kLatent, kInter);
    }
  }
};

struct Call {
  int64_t rows = 0;
  std::vector<float> z, weights;
  std::vector<int32_t> ids;
};

// `experts`: those that the rows may choose from; with as few as top_k, everyone chooses the same.
inline Call make_call(Random& random, int64_t rows, std::vector<int32_t> experts, bool bf16) {
  Call c;
  c.rows = rows;
  c.z = random.normals(rows * kLatent, 1, bf16);
  for (int64_t r = 0; r < rows; ++r) {
    for (size_t s = 0; s < kTopK; ++s) {
      const auto other = static_cast<size_t>(
          random.integer(static_cast<int64_t>(s), static_cast<int64_t>(experts.size()) - 1));
      std::swap(experts[s], experts[other]);
      c.ids.push_back(experts[s]);
      c.weights.push_back(static_cast<float>(random.uniform(0.05, 1)));
    }
  }
  return c;
}

}  // namespace k3::gate
