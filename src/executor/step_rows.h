// A StepBatch held against the limits and against where every slot stands, and laid out as rows:
// what an executor computes. Shared by all executors, so that they refuse the same batches in the
// same words.
#pragma once

#include <cstdint>
#include <vector>

#include "core/status.h"
#include "executor/executor.h"

namespace k3 {

// A segment's rows in the step: rows [first_row, first_row + tokens).
struct RowSpan {
  int slot = 0;
  int64_t position = 0;
  int64_t first_row = 0, tokens = 0;
  const int32_t* pages = nullptr;
  int64_t num_pages = 0;  // that this step may read: up to its last token
};

class StepRows {
 public:
  explicit StepRows(const ExecutorLimits& limits);

  // kInvalidArgument names the segment, the value and what was expected; no slot has moved then.
  Status lay_out(const StepBatch& batch);
  // The step has been computed: its slots stand behind its tokens.
  void advance();

  const ExecutorLimits& limits() const { return limits_; }
  // Of the last lay_out().
  const std::vector<RowSpan>& spans() const { return spans_; }
  const std::vector<int32_t>& tokens() const { return tokens_; }          // one a row
  const std::vector<int64_t>& logit_rows() const { return logit_rows_; }  // rows with logits
  int64_t num_rows() const { return static_cast<int64_t>(tokens_.size()); }
  int64_t num_logit_rows() const { return static_cast<int64_t>(logit_rows_.size()); }

 private:
  Status check(const Segment& s, size_t index);

  ExecutorLimits limits_;
  std::vector<int64_t> slot_position_;             // next position of each slot
  std::vector<uint64_t> page_stamp_, slot_stamp_;  // step in which each was last named
  uint64_t step_ = 0;
  // Reused from step to step.
  std::vector<RowSpan> spans_;
  std::vector<int32_t> tokens_;
  std::vector<int64_t> logit_rows_;
};

}  // namespace k3
