// Runs one request on a fresh engine in the calling thread, with Ctrl-C as its cancel.
#pragma once

#include <atomic>
#include <memory>

#include "engine/engine.h"

namespace k3::cli {

// Set by SIGINT while a RunRequest is running.
inline std::atomic<bool>& interrupted() {
  static std::atomic<bool> flag{false};
  return flag;
}
// Makes SIGINT set the flag (a second one ends the process); restores the old action at the end.
class InterruptGuard {
 public:
  InterruptGuard();
  ~InterruptGuard();
  InterruptGuard(const InterruptGuard&) = delete;
  InterruptGuard& operator=(const InterruptGuard&) = delete;

 private:
  void (*before_)(int);
};

// Steps until the request has finished. The status is the engine's own (fatal) error.
Status run_request(Engine* engine, Request request);

}  // namespace k3::cli
