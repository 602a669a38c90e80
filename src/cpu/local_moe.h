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
  // row_index: where row r lies, [rows]; null: at r.
  void build(const int32_t* topk_ids, int64_t rows, int64_t top_k, int64_t first_expert,
             int64_t num_experts, const int32_t* row_index = nullptr);
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

// Rows through the experts they chose: W1/W3 and situ, W2. What LocalMoe and EpMoe share.
class ExpertCompute {
 public:
  Status init(const ModelWeights* weights, ThreadPool* pool, const Kernels* kernels,
              NumericsPolicy policy, int64_t max_assignments);
  // x: rows of latents, out: [assignment][latent], as `routes` numbers both. `expert_bytes` (may be
  // null) += bytes of the experts read.
  void run(int64_t layer, const float* x, const ExpertRoutes& routes, float* out,
           int64_t* expert_bytes);
  int64_t scratch_bytes() const { return hidden_.bytes() + scratch_.bytes(); }

 private:
  const ModelWeights* weights_ = nullptr;
  ThreadPool* pool_ = nullptr;
  const Kernels* kernels_ = nullptr;
  NumericsPolicy policy_;
  Buffer<float> hidden_;   // [assignment position][moe_intermediate]
  Buffer<float> scratch_;  // per thread: decoded weight tile, gate tile, up tile
  int64_t scratch_per_thread_ = 0;
};

class LocalMoe : public MegaMoe {
 public:
  static Result<std::unique_ptr<LocalMoe>> create(const ModelWeights* weights, ThreadPool* pool,
                                                  const Kernels* kernels, NumericsPolicy policy,
                                                  int64_t max_rows);
  Status run(const MoeCall& call) override;
  int64_t scratch_bytes() const;

 private:
  LocalMoe() = default;
  const ModelWeights* weights_ = nullptr;
  ThreadPool* pool_ = nullptr;
  const Kernels* kernels_ = nullptr;
  NumericsPolicy policy_;
  ExpertRoutes routes_;
  ExpertCompute experts_;
  Buffer<float> out_;  // [row * top_k + slot][latent]
};

}  // namespace k3
