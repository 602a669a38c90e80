// An executor without a model. Logits are a hash of the sequence's own token history, read back
// through the block table and cross-checked against the slot's state: a wrong slot, page, position
// or token shows as other logits or as a violation. Checks every promise the engine makes in
// executor/executor.h, and breaks its own on request.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "core/status.h"
#include "executor/executor.h"

namespace k3 {

inline uint64_t mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

inline constexpr uint64_t kEmptyHistory = 0x6b33;

inline uint64_t extend(uint64_t history, int32_t token) {
  return mix(history ^ mix(static_cast<uint64_t>(token) + 1));
}

// The model: logits in [-4, 4] after a history of tokens.
inline void fake_logits(uint64_t history, std::span<float> row) {
  for (size_t v = 0; v < row.size(); ++v) {
    row[v] = static_cast<float>(mix(history + v * 0x51ed27u) >> 40) * (8.0f / (1 << 24)) - 4.0f;
  }
}

class FakeExecutor : public Executor {
 public:
  explicit FakeExecutor(ExecutorLimits limits)
      : limits_(limits),
        slots_(static_cast<size_t>(limits.num_slots)),
        pages_(static_cast<size_t>(limits.num_pages)) {}

  // ---- injections; set before use, called on the thread that steps
  std::function<Status(const StepBatch&)> before_step;  // an error makes the step fail, unchanged
  std::function<void(const StepBatch&, const Segment&, std::span<float>)> on_row;
  std::chrono::microseconds delay{0};
  int64_t drop_rows = 0;  // returns that many rows of logits too few

  // ---- what it saw
  std::vector<std::string> violations;
  int64_t num_steps = 0;
  int64_t most_rows = 0, most_segments = 0, mixed_steps = 0;

  const ExecutorLimits& limits() const override { return limits_; }
  std::vector<MemoryItem> memory() const override { return {}; }
  std::string description() const override { return "fake"; }

  Status step(const StepBatch& batch, StepResult* result) override {
    if (delay.count() > 0) std::this_thread::sleep_for(delay);
    ++num_steps;
    const size_t before = violations.size();
    check(batch);
    if (violations.size() != before) return {ErrorCode::kInternal, violations.back()};
    if (before_step) K3_RETURN_IF_ERROR(before_step(batch));

    const size_t vocab = static_cast<size_t>(limits_.vocab_size);
    logits_.clear();
    for (const Segment& s : batch.segments) {
      Slot& slot = slots_[static_cast<size_t>(s.slot)];
      if (s.position == 0) slot = {.epoch = ++last_epoch_, .position = 0, .state = kEmptyHistory};
      for (const int32_t& token : s.tokens) {
        Page& page = pages_[page_of(s, slot.position)];
        const size_t at = static_cast<size_t>(slot.position % kPageTokens);
        if (at == 0) page = {.epoch = slot.epoch, .tokens = {}};
        page.tokens.resize(at);
        page.tokens.push_back(token);
        slot.state = extend(slot.state, token);
        ++slot.position;
        const bool last = &token == &s.tokens.back();
        if (s.logits == Logits::kAll || (s.logits == Logits::kLast && last)) {
          logits_.resize(logits_.size() + vocab);
          const std::span<float> row(logits_.data() + logits_.size() - vocab, vocab);
          fake_logits(history_from_pages(s, slot), row);
          if (on_row) on_row(batch, s, row);
        }
      }
    }
    result->vocab_size = limits_.vocab_size;
    result->num_rows = static_cast<int64_t>(logits_.size() / vocab) - drop_rows;
    result->logits = logits_;
    return {};
  }

 private:
  struct Slot {
    uint64_t epoch = 0;  // which sequence; 0 = none
    int64_t position = 0;
    uint64_t state = 0;
  };
  struct Page {
    uint64_t epoch = 0;
    std::vector<int32_t> tokens;
  };

  static size_t page_of(const Segment& s, int64_t position) {
    return static_cast<size_t>(s.pages[static_cast<size_t>(position / kPageTokens)]);
  }

  template <typename... Args>
  void violation(const Args&... args) {
    violations.push_back(cat(args...));
  }

  void check(const StepBatch& batch) {
    int64_t rows = 0, logit_rows = 0;
    bool decodes = false, prefills = false;
    std::set<int> slots;
    std::set<int32_t> pages;
    for (const Segment& s : batch.segments) {
      const int64_t n = static_cast<int64_t>(s.tokens.size());
      rows += n;
      logit_rows += s.logits == Logits::kAll ? n : s.logits == Logits::kLast ? 1 : 0;
      (n == 1 && s.position > 0 ? decodes : prefills) = true;
      if (n == 0) violation("a segment without tokens");
      if (s.slot < 0 || s.slot >= limits_.num_slots) {
        violation("slot ", s.slot);
        return;
      }
      if (!slots.insert(s.slot).second) violation("two segments of slot ", s.slot);
      for (int32_t token : s.tokens) {
        if (token < 0 || token >= limits_.vocab_size) violation("token ", token);
      }
      const Slot& slot = slots_[static_cast<size_t>(s.slot)];
      if (s.position != 0 && s.position != slot.position) {
        violation("slot ", s.slot, " stands at ", slot.position, ", segment at ", s.position);
      }
      if (s.position + n > limits_.max_positions) violation("position ", s.position + n);
      if (static_cast<int64_t>(s.pages.size()) * kPageTokens < s.position + n) {
        violation("block table of ", s.pages.size(), " pages for ", s.position + n, " tokens");
        return;
      }
      for (int32_t page : s.pages) {
        if (page < 0 || page >= limits_.num_pages) {
          violation("page ", page);
          return;
        }
        if (!pages.insert(page).second) violation("page ", page, " of two sequences");
      }
      // What the sequence wrote must still be its own.
      for (int64_t p = 0; p < s.position; p += kPageTokens) {
        if (pages_[page_of(s, p)].epoch != slot.epoch) {
          violation("page ", page_of(s, p), " no longer belongs to the sequence of slot ", s.slot);
        }
      }
    }
    if (batch.segments.empty()) violation("an empty batch");
    if (rows > limits_.max_rows) violation(rows, " rows");
    if (logit_rows > limits_.max_logit_rows) violation(logit_rows, " rows of logits");
    most_rows = std::max(most_rows, rows);
    most_segments = std::max(most_segments, static_cast<int64_t>(batch.segments.size()));
    mixed_steps += decodes && prefills ? 1 : 0;
  }

  uint64_t history_from_pages(const Segment& s, const Slot& slot) {
    uint64_t history = kEmptyHistory;
    for (int64_t p = 0; p < slot.position; ++p) {
      history = extend(history, pages_[page_of(s, p)].tokens[static_cast<size_t>(p % kPageTokens)]);
    }
    if (history != slot.state) violation("pages and state of slot ", s.slot, " disagree");
    return history;
  }

  ExecutorLimits limits_;
  std::vector<Slot> slots_;
  std::vector<Page> pages_;
  std::vector<float> logits_;
  uint64_t last_epoch_ = 0;
};

}  // namespace k3
