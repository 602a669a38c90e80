// Continuous batching over an Executor. A request's life, top to bottom:
//   submit (validated, queued) -> admitted (slot and all the pages of its lifetime) -> prefill in
//   chunks -> decode one token a step -> finished (slot and pages returned), or cancelled / failed at
//   any of these.
// Engine is single-threaded and deterministic given its calls and the clock passed in; EngineLoop
// (engine_loop.h) gives it a thread and an inbox.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "core/status.h"
#include "engine/request.h"
#include "executor/executor.h"

namespace k3 {

struct EngineOptions {
  int64_t max_model_len = 0;           // prompt + output tokens of one request
  int64_t max_num_seqs = 0;            // requests decoding at once, <= executor slots
  int64_t max_num_batched_tokens = 0;  // rows of one step, <= executor max_rows
  int64_t max_queue = 1024;            // waiting requests; beyond it submit refuses (kUnavailable)
  std::vector<int32_t> end_token_ids;  // every configured end id
  std::function<double()> clock;       // seconds, monotonic
};

struct EngineStats {
  int64_t running = 0, waiting = 0;
  int64_t slots_free = 0, pages_free = 0, pages_total = 0;
  int64_t steps = 0, prompt_tokens = 0, generated_tokens = 0;
  int64_t finished_stop = 0, finished_length = 0, finished_cancelled = 0, finished_error = 0;
};

class Engine {
 public:
  Engine(Executor* executor, EngineOptions options);
  ~Engine();

  // Checks a request against every limit without queueing it. kInvalidArgument names the field, the
  // value and the limit (an empty prompt; prompt + max_tokens beyond max_model_len, with both
  // numbers; a token id out of range; a parameter out of range).
  Status validate(const Request& request) const;

  // validate, then queue. kUnavailable when the queue is full.
  Result<RequestId> submit(Request request);

  // Queued or running; its sink gets on_finish(kCancelled) and its slot is free before the next step.
  // Unknown or finished ids are ignored.
  void cancel(RequestId id);

  // One scheduling decision and at most one executor step. Returns whether anything is left to do.
  // An error is fatal to the engine (kDevice, kRankLost, kInternal): every request has been finished
  // with it.
  Result<bool> step();

  // Ends every queued and running request with `error`.
  void fail_all(const Status& error);

  EngineStats stats() const;
  const EngineOptions& options() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace k3
