// The step contract on one card (docs/gpu.md). Weights, state, pages and scratch lie in its memory;
// decode steps replay a graph of their bucket of rows, other steps are launched one by one: the
// same kernels, the same bits.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/tensor_source.h"
#include "config/model_config.h"
#include "executor/executor.h"
#include "model/numerics.h"
#include "model/weights.h"

namespace k3::cuda {

// Rows of a captured decode step; a step takes the smallest that holds it.
inline constexpr int64_t kBuckets[] = {1, 2, 4, 8, 16, 32, 48, 64, 96, 128};

struct CudaExecutorOptions : ExecutorSizes {
  NumericsPolicy policy{Numerics::kBf16};  // the card lands in bf16 only
  bool enforce_eager = false;              // no graphs
};

// What there is; errors: kDevice when the driver has no usable card.
struct DeviceInfo {
  std::string name;
  int num_sms = 0;
  int64_t total_bytes = 0, free_bytes = 0;
};
Result<DeviceInfo> device_info();

// Time and bytes of what a step's launches do, by family, each family alone in a graph.
struct FamilyTime {
  std::string name;
  int64_t launches = 0;  // in one step
  double seconds = 0;    // of one step
  int64_t bytes = 0;     // weights that one step reads, routed experts that were chosen included
};

class CudaExecutor : public Executor {
 public:
  // `weights` as bound from `source`, which is read here and not needed later. Errors: kDevice,
  // kMemory (with the plan's numbers), kCheckpoint (dimensions or scales the kernels do not take),
  // kInvalidArgument (sizes, policy).
  static Result<std::unique_ptr<CudaExecutor>> create(
      const ModelWeights& weights, const TensorSource& source, const RankSpec& rank,
      const CudaExecutorOptions& options,
      const std::function<void(int64_t done, int64_t total)>& progress = {});
  ~CudaExecutor() override;

  // Bytes on the card: state slots, KV pages, then the rest; weights apart.
  static std::vector<MemoryItem> plan(const ModelConfig& config, const RankSpec& rank,
                                      const CudaExecutorOptions& options);
  // Bytes of the weights, the staging that loading needs beside them included.
  static Result<std::vector<MemoryItem>> plan_weights(const ModelWeights& weights);

  const ExecutorLimits& limits() const override;
  std::vector<MemoryItem> memory() const override;
  Status step(const StepBatch& batch, StepResult* result) override;
  std::string description() const override;

  // For gates: every byte of state, pages, slab and scratch becomes 0xff (NaN). A sequence that
  // starts afterwards must not notice.
  Status poison();

  // For `k3 bench`. Loading: bytes of the source and seconds.
  int64_t load_bytes() const;
  double load_seconds() const;
  // Bytes a second of a pinned copy to the card, and of reads of its memory: the best of several.
  Result<double> copy_ceiling();
  Result<double> read_ceiling();
  // The last decode step again, `repeats` times by its graph (or launch by launch): device seconds
  // of one. Its slots move on; only a bench may do this.
  Result<double> time_last_step(int repeats);
  Result<std::vector<FamilyTime>> profile_last_step(int repeats);

 private:
  struct Impl;
  explicit CudaExecutor(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace k3::cuda
