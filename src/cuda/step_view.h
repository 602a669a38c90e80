// The inputs of one step as kernels see them: device memory, refilled by one copy before each step,
// so that a captured graph replays with new rows, slots, positions and pages.
#pragma once

#include <cstdint>

namespace k3::cuda {

struct StepView {
  // {live rows, segments, logit rows, split attention (0 or 1)}. A kernel's grid covers a bucket of
  // rows or segments; what lies beyond the live count is padding: it may be computed, never routed
  // to an expert, and it touches no state and no page.
  const int32_t* counts = nullptr;
  // [row]
  const int32_t* token = nullptr;
  const int32_t* slot = nullptr;
  const int32_t* position = nullptr;
  // [segment]: rows [first_row, first_row + tokens) are consecutive tokens of one slot, the first
  // at `position` (0: a new sequence, whatever the slot holds).
  const int32_t* segment_slot = nullptr;
  const int32_t* segment_position = nullptr;
  const int32_t* segment_first_row = nullptr;
  const int32_t* segment_tokens = nullptr;
  // [logit row] -> row
  const int32_t* logit_row = nullptr;
  // [slot][page_stride]: page of tokens [64 i, 64 i + 64)
  const int32_t* page_table = nullptr;
  int32_t page_stride = 0;
};

enum StepCount { kLiveRows, kSegments, kLogitRows, kSplitAttention, kNumStepCounts };

}  // namespace k3::cuda
