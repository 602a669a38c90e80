// What a server asks of whatever runs requests: one engine, or a router over several.
#pragma once

#include "core/status.h"
#include "engine/engine.h"
#include "engine/request.h"

namespace k3 {

class FrontEnd {
 public:
  virtual ~FrontEnd() = default;
  // As Engine's, from any thread. kUnavailable after a fatal error or while draining.
  virtual Status validate(const Request& request) const = 0;
  virtual Result<RequestId> submit(Request request) = 0;
  virtual void cancel(RequestId id) = 0;
  virtual EngineStats stats() const = 0;
  virtual const EngineOptions& options() const = 0;
  // Requests that can be open at once; submit answers kUnavailable beyond it.
  virtual int64_t max_open() const { return options().max_open(); }
  // Refuses new requests; returns when the last one has finished or `seconds` have passed (then the
  // rest are cancelled, which waits for the step in progress). True if all finished by themselves.
  // There is no way back.
  virtual bool drain(double seconds) = 0;
  // Not ok once an engine has met a fatal error; /health turns 503 on it.
  virtual Status health() const = 0;
};

}  // namespace k3
