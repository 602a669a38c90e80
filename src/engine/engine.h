// Continuous batching over an Executor. A request's life, top to bottom:
//   submit (validated, queued) -> admitted (slot and all the pages of its lifetime) -> prefill in
//   chunks -> decode one token a step -> finished (slot and pages returned), or cancelled / failed
//   at any of these.
// Engine is single-threaded and deterministic given its calls, its seed and the clock passed in;
// EngineLoop (engine_loop.h) gives it a thread and an inbox.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "core/status.h"
#include "engine/request.h"
#include "executor/executor.h"

namespace k3 {

// Zero (or less) in a limit means "what the executor can do", and more than that is lowered to it;
// Engine::options() gives the resolved values.
struct EngineOptions {
  int64_t max_model_len = 0;  // prompt + output tokens of one request
  int64_t max_num_seqs = 0;   // requests decoding at once, <= executor slots, and at most one
                              // a row of a step and a row of logits
  int64_t max_num_batched_tokens = 0;  // rows of one step, <= executor max_rows
  int64_t max_queue = 1024;            // requests that may wait besides those that may decode
  int32_t max_logprobs = 20;           // bound of SamplingParams::logprobs
  std::vector<int32_t> end_token_ids;  // every configured end id; ids outside the vocabulary are
                                       // dropped: they cannot be generated
  std::optional<uint64_t> seed;   // of the seeds drawn for requests that bring none; unset: the
                                  // system's random source
  std::function<double()> clock;  // seconds, monotonic, callable from any thread; unset: the
                                  // steady clock

  // Requests open at once, in whatever state: so a burst is not refused while slots are still free.
  int64_t max_open() const { return max_num_seqs + max_queue; }
};

// What submit answers beyond max_open().
Status queue_is_full(const EngineOptions& options);

struct EngineStats {
  int64_t running = 0, waiting = 0;
  int64_t slots_free = 0, pages_free = 0, pages_total = 0;
  int64_t steps = 0, prompt_tokens = 0, generated_tokens = 0;
  int64_t finished_stop = 0, finished_length = 0, finished_cancelled = 0, finished_error = 0;
};

class Engine {
 public:
  // `executor` must outlive the engine.
  Engine(Executor* executor, EngineOptions options);
  // Cancels what is left.
  ~Engine();

  // Checks a request against every limit without queueing it. kInvalidArgument names the field, the
  // value and the limit (an empty prompt; prompt + max_tokens beyond max_model_len, with both
  // numbers; a token id out of range; a parameter out of range).
  Status validate(const Request& request) const;

  // validate, then queue. kInvalidArgument without a sink, too; kUnavailable when the queue is full
  // or after a fatal error.
  Result<RequestId> submit(Request request);

  // For a caller that validates, bounds the queue and numbers requests itself (EngineLoop): queues
  // a valid request under an id it has not used before. After a fatal error the sink gets
  // on_finish(kError) at once. Do not mix with submit.
  void enqueue(RequestId id, Request request, double submitted_at);

  // Queued or running; its sink gets on_finish(kCancelled) and its slot is free before the next
  // step. Unknown or finished ids are ignored.
  void cancel(RequestId id);

  // Moves what fits from the queue into slots; step() does it too. Lets stats() tell the queue from
  // what the next step will run.
  void admit();

  // One scheduling decision and at most one executor step (one for each segment when the step
  // fails: docs/engine.md#failures). Returns whether anything is left to do. An error is fatal to
  // the engine (kDevice, kRankLost; kInternal when the executor breaks its contract): every request
  // has been finished with it, and every later step returns it.
  Result<bool> step();

  // An executor step without rows, for peers that step while this rank has nothing to run
  // (docs/ep.md). Errors are fatal, as step()'s.
  Status pad();

  // Ends every queued and running request with `error`, or with kCancelled.
  void fail_all(const Status& error);
  void cancel_all();

  EngineStats stats() const;
  const EngineOptions& options() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace k3
