// A thread around Engine: any thread may submit and cancel; sinks run on the engine's thread, where
// they may call EngineLoop::cancel and stats but must not wait for the loop (drain, destructor).
// The thread sleeps while there is nothing to do; where the executor has peers (Executor::peers),
// it also wakes for each step that a peer begins and pads.
#pragma once

#include <memory>

#include "engine/engine.h"
#include "engine/front_end.h"

namespace k3 {

class EngineLoop : public FrontEnd {
 public:
  // Starts the thread. `executor` must outlive the loop.
  EngineLoop(Executor* executor, EngineOptions options);
  // Cancels what is left and joins; waits for the step in progress. With peers: drain all ranks
  // before the first is destroyed, or those that still run will miss it.
  ~EngineLoop() override;

  Status validate(const Request& request) const override;
  Result<RequestId> submit(Request request) override;
  void cancel(RequestId id) override;
  EngineStats stats() const override;
  const EngineOptions& options() const override;
  bool drain(double seconds) override;
  Status health() const override;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace k3
