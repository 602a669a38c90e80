// The step contract: what the engine asks of a device. A step is the only verb; decode rows,
// prefill chunks and padding are all segments of one StepBatch.
//
// What every implementation promises:
//  * A row stands alone. The logits of a token depend on the tokens before it in its own sequence
//  and
//    on nothing else: not on the other segments, the batch size, the chunking, the slot, the page
//    numbers, the number of threads or ranks. Equality is bitwise.
//  * A segment at position 0 starts a new sequence. Whatever the slot or the pages held before
//    (NaN included) has no effect.
//  * A step that returns an error has changed no slot, unless its code is kDevice or kRankLost,
//  after
//    which the executor is unusable.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "core/status.h"

namespace k3 {

inline constexpr int kPageTokens = 64;  // tokens in one page of MLA latents

enum class Logits {
  kNone,  // a prefill chunk that is not the prompt's last
  kLast,  // the last token of the segment
  kAll,   // every token of the segment
};

// Consecutive tokens of one sequence. A batch holds at most one segment a slot.
struct Segment {
  int slot = 0;
  int64_t position = 0;             // of tokens[0]; must continue where the slot stands, or be 0
  std::span<const int32_t> tokens;  // at least 1, each in [0, vocab_size)
  // Block table: pages[i] holds tokens [64 i, 64 i + 64) of this sequence, for all MLA layers. Must
  // reach the segment's last token. No page may serve two live sequences.
  std::span<const int32_t> pages;
  Logits logits = Logits::kNone;
};

struct StepBatch {
  std::vector<Segment> segments;
};

// Row-major float32 logits for the rows asked for, in segment order then token order. Owned by the
// executor and valid until its next step.
struct StepResult {
  std::span<const float> logits;  // [num_rows, vocab_size]
  int64_t num_rows = 0;
  int64_t vocab_size = 0;
  // What the step had to move at least: weights read once, state read and written, latents of the
  // context read. `k3 bench` holds it against the machine's read bandwidth.
  int64_t bytes = 0;
  std::span<const float> row(int64_t i) const {
    return logits.subspan(static_cast<size_t>(i * vocab_size), static_cast<size_t>(vocab_size));
  }
};

// What an executor is made for.
struct ExecutorSizes {
  int num_slots = 1;
  int64_t max_rows = 512;       // tokens in one step
  int64_t max_logit_rows = 64;  // rows of logits in one step
  int64_t num_pages = 128;      // of kPageTokens tokens
};
// At least one of each; the message names the field.
Status check_sizes(const ExecutorSizes& sizes);

struct ExecutorLimits {
  int num_slots = 0;           // sequences that can be live at once
  int64_t max_rows = 0;        // tokens in one step, over all segments
  int64_t max_logit_rows = 0;  // rows of logits in one step
  int64_t num_pages = 0;       // pages of kPageTokens tokens
  int64_t max_positions = 0;   // the model's context
  int64_t vocab_size = 0;
};

struct MemoryItem {
  std::string name;
  int64_t bytes = 0;
};

// The other ranks of an executor whose steps go together with theirs (docs/ep.md).
class StepPeers {
 public:
  virtual ~StepPeers() = default;
  // A peer has begun a step that this rank has not: it must step too, with an empty batch if it has
  // nothing of its own. Any thread.
  virtual bool waiting() const = 0;
  // `call` runs on a peer's thread whenever waiting() may have become true; it must not block.
  // Empty: nobody listens any more, and no call is in progress when this returns.
  virtual void on_change(std::function<void()> call) = 0;
};

class Executor {
 public:
  virtual ~Executor() = default;
  virtual const ExecutorLimits& limits() const = 0;
  // What it holds: weights, state slots, KV pages, scratch. For logs and /metrics.
  virtual std::vector<MemoryItem> memory() const = 0;
  // An empty batch is a padding step: it serves the peers and changes nothing here.
  virtual Status step(const StepBatch& batch, StepResult* result) = 0;
  // A line for logs and /version: device, ISA, numerics policy, threads.
  virtual std::string description() const = 0;
  // Null: steps stand alone.
  virtual StepPeers* peers() { return nullptr; }
};

}  // namespace k3
