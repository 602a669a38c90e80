// The one authority for the layout of per-sequence state: KDA state and conv window per slot, MLA
// latents per page, attention-residual snapshots per row. Counts are elements, not bytes, unless a
// name says so. Spec 4.
#pragma once

#include <cstdint>

#include "config/model_config.h"
#include "executor/executor.h"

namespace k3 {

// [slot][kda layer][head][v][k] float32, then the windows [slot][kda layer][head][q,k,v][age][d].
struct KdaStateLayout {
  int64_t layers = 0, heads = 0, dim = 0, history = 0;
  explicit KdaStateLayout(const ModelConfig& c)
      : layers(c.num_kda_layers()),
        heads(c.kda_num_heads),
        dim(c.kda_head_dim),
        history(c.short_conv_kernel_size - 1) {}
  int64_t state_per_head() const { return dim * dim; }
  int64_t window_per_head() const { return 3 * history * dim; }
  int64_t state_per_slot() const { return layers * heads * state_per_head(); }
  int64_t window_per_slot() const { return layers * heads * window_per_head(); }
  int64_t state_at(int64_t slot, int64_t layer, int64_t head) const {
    return slot * state_per_slot() + (layer * heads + head) * state_per_head();
  }
  int64_t window_at(int64_t slot, int64_t layer, int64_t head) const {
    return slot * window_per_slot() + (layer * heads + head) * window_per_head();
  }
};

// [page][mla layer][64 tokens][latent_dim].
struct LatentCacheLayout {
  int64_t layers = 0, dim = 0, element_bytes = 4;
  LatentCacheLayout(const ModelConfig& c, int64_t bytes_per_element)
      : layers(c.num_mla_layers()), dim(c.mla_latent_dim()), element_bytes(bytes_per_element) {}
  int64_t row_bytes() const { return dim * element_bytes; }
  int64_t layer_bytes() const { return kPageTokens * row_bytes(); }
  int64_t page_bytes() const { return layers * layer_bytes(); }
  int64_t row_at(int64_t page, int64_t layer, int64_t token_in_page) const {
    return page * page_bytes() + layer * layer_bytes() + token_in_page * row_bytes();
  }
};

// [snapshot][row][hidden], one stride whatever the layer or the number of live rows (a stride that
// followed the live count is how a peer served garbage past its second block).
struct SnapshotLayout {
  int64_t snapshots = 0, max_rows = 0, hidden = 0;
  SnapshotLayout(const ModelConfig& c, int64_t rows)
      : snapshots(c.num_snapshots()), max_rows(rows), hidden(c.hidden_size) {}
  int64_t stride() const { return max_rows * hidden; }
  int64_t at(int64_t snapshot, int64_t row) const { return snapshot * stride() + row * hidden; }
  int64_t size() const { return snapshots * stride(); }
};

// Bytes of one routed expert: w1, w3 and w2 as MXFP4 codes and scales.
inline int64_t expert_bytes(const ModelConfig& c) {
  const int64_t elements = 3 * c.moe_intermediate_size * c.routed_expert_hidden_size;
  return elements / 2 + elements / 32;
}

}  // namespace k3
