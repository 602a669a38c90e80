#include "executor/step_rows.h"

namespace k3 {

Status check_sizes(const ExecutorSizes& sizes) {
  const auto positive = [](const char* what, int64_t v) -> Status {
    if (v > 0) return {};
    return invalid_argument(what, ": ", v, ", expected at least 1");
  };
  K3_RETURN_IF_ERROR(positive("num_slots", sizes.num_slots));
  K3_RETURN_IF_ERROR(positive("max_rows", sizes.max_rows));
  K3_RETURN_IF_ERROR(positive("max_logit_rows", sizes.max_logit_rows));
  return positive("num_pages", sizes.num_pages);
}

namespace {

int64_t pages_for(int64_t tokens) { return (tokens + kPageTokens - 1) / kPageTokens; }

}  // namespace

StepRows::StepRows(const ExecutorLimits& limits) : limits_(limits) {
  slot_position_.assign(static_cast<size_t>(limits.num_slots), 0);
  slot_stamp_.assign(static_cast<size_t>(limits.num_slots), 0);
  page_stamp_.assign(static_cast<size_t>(limits.num_pages), 0);
}

Status StepRows::check(const Segment& s, size_t index) {
  const auto bad = [index](const auto&... what) {
    return invalid_argument("segment ", index, ": ", what...);
  };
  if (s.slot < 0 || s.slot >= limits_.num_slots) {
    return bad("slot ", s.slot, ", expected [0, ", limits_.num_slots, ")");
  }
  if (slot_stamp_[static_cast<size_t>(s.slot)] == step_) {
    return bad("slot ", s.slot, " appears twice in a step");
  }
  slot_stamp_[static_cast<size_t>(s.slot)] = step_;
  const auto count = static_cast<int64_t>(s.tokens.size());
  if (count == 0) return bad("no tokens");
  const int64_t at = slot_position_[static_cast<size_t>(s.slot)];
  if (s.position != 0 && s.position != at) {
    return bad("position ", s.position, ", expected 0 or ", at, " where slot ", s.slot, " stands");
  }
  const int64_t end = s.position + count;
  if (end > limits_.max_positions) {
    return bad("tokens end at position ", end, ", the model's context is ", limits_.max_positions);
  }
  for (const int32_t t : s.tokens) {
    if (t < 0 || t >= limits_.vocab_size) {
      return bad("token ", t, ", expected [0, ", limits_.vocab_size, ")");
    }
  }
  const int64_t pages = pages_for(end);
  if (static_cast<int64_t>(s.pages.size()) < pages) {
    return bad(s.pages.size(), " pages, expected at least ", pages, " for ", end, " tokens");
  }
  for (int64_t i = 0; i < pages; ++i) {
    const int32_t page = s.pages[static_cast<size_t>(i)];
    if (page < 0 || page >= limits_.num_pages) {
      return bad("page ", page, ", expected [0, ", limits_.num_pages, ")");
    }
    if (page_stamp_[static_cast<size_t>(page)] == step_) {
      return bad("page ", page, " appears twice in a step");
    }
    page_stamp_[static_cast<size_t>(page)] = step_;
  }
  return {};
}

Status StepRows::lay_out(const StepBatch& batch) {
  ++step_;
  spans_.clear();
  tokens_.clear();
  logit_rows_.clear();
  for (size_t s = 0; s < batch.segments.size(); ++s) {
    const Segment& segment = batch.segments[s];
    K3_RETURN_IF_ERROR(check(segment, s));
    const int64_t first = num_rows();
    const auto count = static_cast<int64_t>(segment.tokens.size());
    spans_.push_back({segment.slot, segment.position, first, count, segment.pages.data(),
                      pages_for(segment.position + count)});
    tokens_.insert(tokens_.end(), segment.tokens.begin(), segment.tokens.end());
    if (segment.logits == Logits::kLast) logit_rows_.push_back(first + count - 1);
    if (segment.logits == Logits::kAll) {
      for (int64_t t = 0; t < count; ++t) logit_rows_.push_back(first + t);
    }
  }
  if (num_rows() > limits_.max_rows) {
    return invalid_argument("step of ", num_rows(), " rows, expected at most ", limits_.max_rows);
  }
  if (num_logit_rows() > limits_.max_logit_rows) {
    return invalid_argument("step with ", num_logit_rows(), " rows of logits, expected at most ",
                            limits_.max_logit_rows);
  }
  return {};
}

void StepRows::advance() {
  for (const RowSpan& span : spans_) {
    slot_position_[static_cast<size_t>(span.slot)] = span.position + span.tokens;
  }
}

}  // namespace k3
