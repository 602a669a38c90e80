// Names to bytes. A Checkpoint is a model directory opened for one rank: every header read and held
// against the manifest (docs/checkpoint.md), the rank's tensors mapped, nothing copied.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/load_plan.h"
#include "checkpoint/tensor_source.h"
#include "config/model_config.h"
#include "core/status.h"

namespace k3 {

// Bytes done and bytes in all; called on the thread that called, done never decreasing, last call
// with done == total.
using ProgressFn = std::function<void(int64_t done, int64_t total)>;

// Immutable after open(); every const method may be called from any thread.
class Checkpoint : public TensorSource {
 public:
  // Opens MODEL_DIR/model.safetensors.index.json with its shards, or the single file
  // MODEL_DIR/model.safetensors where there is no index.
  //
  // `config` may be the file's own config or one cut by truncate_layers(): tensors of later layers
  // are then counted as skipped. Vision tensors (vision_tower., mm_projector.) are always skipped.
  // Order: rank spec, headers, exact set and shape contract, mapping, then the zero tail of each
  // A_log, the only payload bytes that open() touches.
  //
  // Errors: kInvalidArgument for a rank spec that does not fit the config (before any file is
  // read); kCheckpoint for everything wrong with the files, naming tensor, file, found and
  // expected.
  static Result<std::unique_ptr<Checkpoint>> open(const std::string& model_dir,
                                                  const ModelConfig& config, const RankSpec& rank);
  ~Checkpoint() override;
  Checkpoint(const Checkpoint&) = delete;
  Checkpoint& operator=(const Checkpoint&) = delete;

  // The tensor of that canonical name (without `language_model.`):
  // "model.layers.3.self_attn.A_log". nullptr if this rank does not hold it. dtype and shape are
  // those of the manifest, always (A_log: max(kda_num_heads, kda_head_dim) elements, of which the
  // first kda_num_heads count and the rest are zero).
  const TensorView* find(std::string_view canonical_name) const override;
  void read(const TensorView& tensor, int64_t first, int64_t bytes, std::byte* out) const override;

  // Payload bytes of the tensors this rank holds.
  int64_t total_bytes() const;
  // How many tensors this rank holds.
  int64_t num_tensors() const;
  // What is held, by group, and what was skipped.
  const LoadPlan& plan() const;
  const RankSpec& rank() const;

  // Reads the rank's tensors into the page cache, in file order; afterwards a first step does not
  // wait for the disk. Mapped memory only: nothing is allocated. Errors: kCheckpoint if a file can
  // no longer be read (shrunk since open()).
  Status warm(const ProgressFn& progress = {}) const;

 private:
  struct Impl;
  explicit Checkpoint(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace k3
