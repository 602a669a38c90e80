// Where each tensor of the model lies: the index and the headers of a checkpoint held against the
// manifest. Reads headers only, so a terabyte is checked in seconds.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/load_plan.h"
#include "checkpoint/manifest.h"
#include "config/model_config.h"
#include "core/status.h"

namespace k3 {

struct CatalogFile {
  std::string path;
  int64_t size = 0;  // bytes, when its header was read
};

struct LocatedTensor {
  TensorSpec spec;
  int32_t file = -1;   // index into Catalog::files
  int64_t offset = 0;  // of the first payload byte from the start of that file
};

struct Catalog {
  std::vector<CatalogFile> files;      // those that hold a tensor of the model
  std::vector<LocatedTensor> tensors;  // exactly the manifest, in its order
  bool prefixed = false;               // names carry `language_model.`
  TensorCount skipped_layers;
  TensorCount skipped_vision;
  std::vector<std::string> notes;
};

// Reads MODEL_DIR/model.safetensors.index.json and the headers of the shards it needs, or
// MODEL_DIR/model.safetensors where there is no index (an index wins; a note says so). Shards that
// hold nothing but skipped tensors need not exist. Errors (kCheckpoint): broken or missing files;
// names that differ from the manifest (the first ten and the count); a layer whose tensors are of
// the other attention kind; dtypes and shapes that differ; an index that disagrees with its shards.
Result<Catalog> read_catalog(const std::string& model_dir, const ModelConfig& config);

}  // namespace k3
