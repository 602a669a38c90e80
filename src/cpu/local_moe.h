// The MegaMoE contract where every expert is in this process: gather rows by expert, W1/W3 and
// situ, W2, combine in slot order.
#pragma once

#include <memory>
#include <vector>

#include "core/thread_pool.h"
#include "cpu/buffer.h"
#include "cpu/kernels/kernels.h"
#include "model/numerics.h"
#include "model/weights.h"
#include "moe/mega_moe.h"

namespace k3 {

// Which (row, slot) pairs each expert serves, sorted by expert, rows ascending within one. An
// "assignment" is row * top_k + slot.
class ExpertRoutes {
 public:
  void build(const int32_t* topk_ids, int64_t rows, int64_t top_k, int64_t first_expert,
             int64_t num_experts);
  struct Group {
    int64_t expert;  // local
    int64_t begin, end;
  };
  const std::vector<Group>& groups() const { return groups_; }  // experts with work, ascending
  const std::vector<int32_t>& assignments() const { return assignments_; }
  const std::vector<int32_t>& rows() const { return rows_; }  // of each assignment
  void reserve(int64_t max_assignments, int64_t num_experts);

 private:
  std::vector<int64_t> offset_;
  std::vector<Group> groups_;
  std::vector<int32_t> assignments_, rows_;
};

class LocalMoe : public MegaMoe {
 public:
  static Result<std::unique_ptr<LocalMoe>> create(const ModelWeights* weights, ThreadPool* pool,
                                                  const Kernels* kernels, NumericsPolicy policy,
                                                  int64_t max_rows);
  // Another rank's expert block, computed by this process too: each rank's rows go through its own
  // weights, and the combine still adds slots in order, so the result does not depend on the split.
  void add_rank(const ModelWeights* weights) { ranks_.push_back(weights); }
  Status run(const MoeCall& call) override;
  int64_t scratch_bytes() const;

 private:
  LocalMoe() = default;
  void run_rank(const ModelWeights& weights, const MoeCall& call);

  std::vector<const ModelWeights*> ranks_;
  ThreadPool* pool_ = nullptr;
  const Kernels* kernels_ = nullptr;
  NumericsPolicy policy_;
  int64_t max_rows_ = 0;
  ExpertRoutes routes_;
  Buffer<float> hidden_;   // [assignment position][moe_intermediate]
  Buffer<float> out_;      // [row * top_k + slot][latent]
  Buffer<float> scratch_;  // per thread: decoded weight tile, gate tile, up tile
  int64_t scratch_per_thread_ = 0;
};

}  // namespace k3
