// What `k3 inspect` shows: a model directory as config and headers describe it. No payload is read.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/load_plan.h"
#include "config/model_config.h"
#include "core/status.h"

namespace k3 {

struct InspectOptions {
  int64_t ep_size = 1;     // ranks to plan for
  int64_t num_layers = 0;  // cut to that many layers; 0: all
};

// Per-sequence state, in bytes (float32 recurrent state, bf16 convolution window and MLA cache).
struct StateBytes {
  int64_t kda_recurrent_per_slot = 0;  // all KDA layers
  int64_t kda_conv_per_slot = 0;
  int64_t mla_cache_per_token = 0;  // all MLA layers
};
StateBytes state_bytes(const ModelConfig& config);

struct InspectReport {
  std::string model_dir;
  ModelConfig config;
  Status coverage;  // ok: the files hold exactly this model. Otherwise what is wrong with them
  int64_t num_files = 0;  // that hold tensors of the model; 0 unless coverage is ok
  int64_t file_bytes = 0;
  bool prefixed = false;
  LoadPlan whole;               // ep_size 1; skipped parts and notes included if coverage is ok
  std::vector<LoadPlan> ranks;  // ep_size of them
  StateBytes state;
};

// Errors: kCheckpoint if config.json cannot be used, kInvalidArgument for the options. Weights that
// are missing or broken do not fail the report, they are its `coverage`.
Result<InspectReport> inspect_checkpoint(const std::string& model_dir,
                                         const InspectOptions& options);

std::string render_text(const InspectReport& report);  // for people, ends with a newline
std::string render_json(const InspectReport& report);  // for programs, one object, two-space indent

}  // namespace k3
