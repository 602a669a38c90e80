// The step contract on the CPU. Weights stay in the mapped checkpoint; state, pages and scratch are
// float32 (pages bf16 under the bf16 policy, where every latent is a bf16 value anyway).
#pragma once

#include <memory>
#include <string>

#include "checkpoint/checkpoint.h"
#include "config/model_config.h"
#include "executor/executor.h"
#include "model/numerics.h"
#include "moe/ep_group.h"
#include "moe/mega_moe.h"

namespace k3 {

struct CpuExecutorOptions : ExecutorSizes {
  int num_threads = 0;  // 0: every core of the affinity mask
  std::string isa = "auto";
  NumericsPolicy policy;
  // Ranks whose steps go together; must outlive the executor. Its shape's max_rows is at least the
  // executor's. Null: this rank holds every expert.
  EpGroup* ep = nullptr;
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
  StepPeers* peers() override;

  // For gates: every state, window, page and scratch value becomes `value` (NaN, say). A sequence
  // that starts afterwards must not notice.
  void poison(float value);

 private:
  struct Impl;
  explicit CpuExecutor(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace k3
