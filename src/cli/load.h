// From flags to a running engine: model directory -> config, checkpoint, tokenizer, executor.
// Prints what it decided and a progress bar to standard error.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "cli/args.h"
#include "cli/progress.h"
#include "config/model_config.h"
#include "cpu/cpu_executor.h"
#include "engine/engine.h"
#include "moe/mpi_group.h"
#include "text/tokenizer.h"

namespace k3::cli {

struct ModelArgs {
  std::string model;
  std::string tokenizer;  // empty: the model's directory
  int64_t layers = 0;     // 0: all
  std::string numerics = "f32";
  float lora_norm_eps = 1e-5f;
  std::string isa = "auto";
  int threads = 0;
  bool quiet = false;
  int64_t ep_size = 1;     // expert-parallel ranks
  double ep_timeout = 30;  // seconds
};
// --ep-size and --ep-timeout, for the commands that run several ranks.
void add_ep_flags(CLI::App* app, ModelArgs* args);
// --model DIR, or the directory as the first argument (as `vllm serve DIR` takes it).
void add_model_path(CLI::App* app, std::string* model);
void add_model_flags(CLI::App* app, ModelArgs* args, bool with_tokenizer);

struct CapacityArgs {
  int64_t max_model_len = 0;             // 0: the model's context
  int64_t max_num_seqs = 0;              // 0: as many as memory allows, at most 32
  int64_t max_num_batched_tokens = 512;  // rows of a step
  int64_t kv_cache_memory_bytes = 0;  // 0: what max_num_seqs full contexts need, if memory allows
  int64_t max_logit_rows = 0;         // not a flag; 0: one a sequence
};
void add_capacity_flags(CLI::App* app, CapacityArgs* args);

struct LoadedModel {
  ModelConfig config;
  std::shared_ptr<const Checkpoint> checkpoint;
  std::shared_ptr<const Tokenizer> tokenizer;  // null when not asked for
  // The ranks of this process (docs/ep.md): all of them as threads, or one under mpirun.
  std::unique_ptr<EpGroup> ep;  // null for one rank
  MpiGroup* mpi = nullptr;      // `ep`, when ranks are processes
  std::vector<std::unique_ptr<CpuExecutor>> executors;
  EngineOptions engine;

  CpuExecutor& executor() const { return *executors.front(); }
};

// The config, cut to --layers.
Result<ModelConfig> load_config(const ModelArgs& args);
Result<NumericsPolicy> numerics_policy(const ModelArgs& args);

// `progress` (0..1) is called while weights are read; may be empty.
Result<LoadedModel> load_model(const ModelArgs& args, const CapacityArgs& capacity,
                               bool with_tokenizer,
                               const std::function<void(double)>& progress = {});

// Bytes the system says are available to new allocations; 0 if it does not say.
int64_t available_memory_bytes();

}  // namespace k3::cli
