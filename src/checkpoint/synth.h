// Synthetic K3 checkpoints of any size: seeded random weights under the real names, dtypes and
// packing, scaled so that activations stay finite at any depth and routing, mixes and logits are
// neither flat nor saturated (docs/checkpoint.md#synthetic).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "checkpoint/checkpoint.h"
#include "checkpoint/manifest.h"
#include "checkpoint/synth_values.h"
#include "config/model_config.h"
#include "core/status.h"

namespace k3 {

struct SynthOptions {
  ModelConfig config;
  uint64_t seed = 1;
  int64_t max_shard_bytes = int64_t{4} << 30;  // payload; a larger tensor gets a shard of its own
  bool language_model_prefix = true;
  int num_threads = 0;  // 0: one per core
};

// "tiny" (k3-nano's dimensions, 32 MB), "1g" (about 1 GiB: the real head geometry, 13 layers, 128
// experts), "k3" (the release: 93 layers, 896 experts, 1.5 TB). `layers` and `experts` replace the
// preset's own where positive; MLA layers are i % 4 == 3 and the last. Token ids are those of the
// tokenizer that write_synthetic() writes. Errors: kInvalidArgument for an unknown name,
// kCheckpoint from validate_model_config().
Result<ModelConfig> synth_preset(std::string_view name, int64_t layers = 0, int64_t experts = 0);

// Bytes that the weights of `config` take on disk, headers aside.
int64_t synth_payload_bytes(const ModelConfig& config);

// Writes config.json, generation_config.json, tiktoken.model, tokenizer_config.json, the shards and
// their index into `dir`, which must be new or empty. The tokenizer has the 256 bytes as ranks,
// then K3's markup tokens from 256 on, [UNK] and [PAD] last; the written config's token ids follow
// it, whatever `options.config` says. config.json is written last, so an interrupted run leaves no
// directory that looks whole. Errors: kInvalidArgument (bad options, a vocabulary below 264, a
// directory in use, a file that cannot be written), kMemory (the disk is too small).
Status write_synthetic(const SynthOptions& options, const std::string& dir,
                       const ProgressFn& progress = {});

// How the tensor `spec` of `config` is filled under `seed`.
SynthTensor synth_tensor(const ModelConfig& config, const TensorSpec& spec, uint64_t seed);

// Bytes [first, first + bytes) of the tensor, little-endian; both multiples of 8 except that the
// tensor may end anywhere.
void synth_fill(const SynthTensor& tensor, int64_t first, int64_t bytes, std::byte* out);

}  // namespace k3
