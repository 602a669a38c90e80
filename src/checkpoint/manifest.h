// The tensors of a K3 checkpoint, generated from its config: canonical name, dtype, shape. The one
// place where tensor names are written down (docs/model.md#tensors).
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/load_plan.h"
#include "config/model_config.h"
#include "core/dtype.h"

namespace k3 {

// Names in checkpoints may carry this prefix: all text tensors of one checkpoint, or none.
inline constexpr std::string_view kTextPrefix = "language_model.";

struct TensorSpec {
  std::string name;  // canonical: without kTextPrefix
  DType dtype = DType::kBF16;
  std::vector<int64_t> shape;  // row-major, [out, in] for matrices
  TensorGroup group = TensorGroup::kNorms;
  int64_t layer = -1;   // -1 for tensors outside the layers
  int64_t expert = -1;  // routed experts only
  int64_t bytes = 0;
};

// Elements stored for A_log: one per head, padded with zeros to the head dimension (96 heads are
// stored as 128 in the release).
int64_t a_log_length(const ModelConfig& config);

// Calls `visit` for every tensor in file order: embedding, layers, final norms, head; the six
// tensors of an expert follow one another, experts ascend.
void for_each_tensor(const ModelConfig& config,
                     const std::function<void(const TensorSpec&)>& visit);

// The same as a list: 497,052 entries for the 896-expert release.
std::vector<TensorSpec> build_manifest(const ModelConfig& config);

// The layer of a canonical name "model.layers.17.x", or -1.
int64_t layer_of_name(std::string_view canonical_name);

// Tensors of the parts of a multimodal checkpoint that are not the text model.
bool is_vision_name(std::string_view name);

// "[128, 1, 4]"
std::string shape_text(const std::vector<int64_t>& shape);

}  // namespace k3
