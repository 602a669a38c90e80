// The step contract on the CPU. Weights stay in the mapped checkpoint; state, pages and scratch are
// float32 (pages bf16 under the bf16 policy, where every latent is a bf16 value anyway).
#pragma once

#include <memory>
#include <string>

#include "checkpoint/checkpoint.h"
#include "config/model_config.h"
#include "executor/executor.h"
#include "model/numerics.h"
#include "moe/mega_moe.h"

namespace k3 {

struct CpuExecutorOptions {
  int num_slots = 1;
  int64_t max_rows = 512;       // tokens in one step
  int64_t max_logit_rows = 64;  // rows of logits in one step
  int64_t num_pages = 128;      // 64 tokens each
  int num_threads = 0;          // 0: every core of the affinity mask
  std::string isa = "auto";
  NumericsPolicy policy;
  // Expert parallelism in one process: the checkpoints of ranks 1 .. ep_size - 1, each opened for
  // its own rank, so that each block of experts is computed from its own rank's mapping.
  std::vector<std::shared_ptr<const Checkpoint>> other_ranks;
};

class CpuExecutor : public Executor {
 public:
  // `checkpoint` and `config` as loaded for `rank`. `moe` serves the routed experts; null: all
  // experts are local. Errors: kCheckpoint (a weight missing), kMemory, kInvalidArgument (isa,
  // sizes).
  static Result<std::unique_ptr<CpuExecutor>> create(std::shared_ptr<const Checkpoint> checkpoint,
                                                     const ModelConfig& config,
                                                     const RankSpec& rank,
                                                     const CpuExecutorOptions& options,
                                                     std::unique_ptr<MegaMoe> moe = nullptr);
  ~CpuExecutor() override;

  // Bytes an executor would hold, weights apart, before anything is allocated.
  static std::vector<MemoryItem> plan(const ModelConfig& config, const CpuExecutorOptions& options);

  const ExecutorLimits& limits() const override;
  std::vector<MemoryItem> memory() const override;
  Status step(const StepBatch& batch, StepResult* result) override;
  std::string description() const override;

  // For gates: every state, window, page and scratch value becomes `value` (NaN, say). A sequence
  // that starts afterwards must not notice.
  void poison(float value);

 private:
  struct Impl;
  explicit CpuExecutor(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace k3
