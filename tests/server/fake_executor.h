// An Executor that says what a script tells it to: the engine, the tokenizer and the server around
// it are the real ones.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "executor/executor.h"

namespace k3::testing {

// The id that follows after `generated` ids have been said to `prompt`.
using Script = std::function<int32_t(const std::vector<int32_t>& prompt, size_t generated)>;

class FakeExecutor : public Executor {
 public:
  FakeExecutor(int slots, int64_t vocab_size, Script script) : script_(std::move(script)) {
    limits_.num_slots = slots;
    limits_.max_rows = std::max(256, slots);
    limits_.max_logit_rows = limits_.max_rows;
    limits_.num_pages = slots * 64;
    limits_.max_positions = 4096;
    limits_.vocab_size = vocab_size;
    sequences_.resize(static_cast<size_t>(slots));
  }

  const ExecutorLimits& limits() const override { return limits_; }
  std::vector<MemoryItem> memory() const override { return {}; }
  std::string description() const override { return "scripted executor"; }

  Status step(const StepBatch& batch, StepResult* result) override {
    if (step_delay.count() > 0) std::this_thread::sleep_for(step_delay);
    while (hold) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (fail_steps > 0) {
      --fail_steps;
      return {ErrorCode::kDevice, "the scripted device broke"};
    }
    ++steps;
    // Rows are zero but for the said id; only what the last step wrote is wiped.
    for (size_t at : spikes_) logits_[at] = 0;
    spikes_.clear();
    const auto vocab = static_cast<size_t>(limits_.vocab_size);
    size_t rows = 0;
    for (const Segment& s : batch.segments) {
      Sequence& q = sequences_[static_cast<size_t>(s.slot)];
      if (s.position == 0) q = {};
      q.ids.insert(q.ids.end(), s.tokens.begin(), s.tokens.end());
      if (s.logits == Logits::kNone) continue;
      if (q.prompt == 0) q.prompt = q.ids.size();
      const std::vector<int32_t> prompt(q.ids.begin(),
                                        q.ids.begin() + static_cast<int64_t>(q.prompt));
      const int32_t id = script_(prompt, q.ids.size() - q.prompt);
      if (logits_.size() < (rows + 1) * vocab) logits_.resize((rows + 1) * vocab);
      spikes_.push_back(rows * vocab + static_cast<size_t>(id));
      logits_[spikes_.back()] = 30.0f;
      ++rows;
    }
    result->logits = {logits_.data(), rows * vocab};
    result->num_rows = static_cast<int64_t>(rows);
    result->vocab_size = limits_.vocab_size;
    return {};
  }

  std::chrono::microseconds step_delay{0};  // set before use
  std::atomic<bool> hold{false};            // steps wait while true
  std::atomic<int> fail_steps{0};
  std::atomic<int64_t> steps{0};

 private:
  struct Sequence {
    std::vector<int32_t> ids;
    size_t prompt = 0;  // tokens of the prompt, once known
  };
  ExecutorLimits limits_;
  Script script_;
  std::vector<Sequence> sequences_;
  std::vector<float> logits_;
  std::vector<size_t> spikes_;
};

}  // namespace k3::testing
