// A thread around Engine: any thread may submit and cancel; sinks run on the engine's thread, where
// they may call EngineLoop::cancel and stats but must not wait for the loop (drain, destructor).
// The thread sleeps while there is nothing to do.
#pragma once

#include <memory>

#include "engine/engine.h"

namespace k3 {

class EngineLoop {
 public:
  // Starts the thread. `executor` must outlive the loop.
  EngineLoop(Executor* executor, EngineOptions options);
  // Cancels what is left and joins; waits for the step in progress.
  ~EngineLoop();

  // As Engine's, from any thread. kUnavailable after a fatal error or while draining.
  Status validate(const Request& request) const;
  Result<RequestId> submit(Request request);
  void cancel(RequestId id);
  EngineStats stats() const;
  const EngineOptions& options() const;

  // Refuses new requests; returns when the last one has finished or `seconds` have passed (then the
  // rest are cancelled, which waits for the step in progress). True if all finished by themselves.
  // There is no way back.
  bool drain(double seconds);

  // Not ok once the engine has met a fatal error; /health turns 503 on it.
  Status health() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace k3
