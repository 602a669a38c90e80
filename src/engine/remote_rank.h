// A rank in another process, as a FrontEnd: requests go out as messages, tokens come back as
// messages. The two ends know nothing of the transport: each is given a way to send and is fed what
// arrives. Messages between two ranks keep their order.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "engine/engine_loop.h"
#include "engine/front_end.h"

namespace k3 {

using SendMessage = std::function<void(const std::string&)>;

// The front end's side.
class RemoteRank : public FrontEnd {
 public:
  // `local`: this process's own engine, which has the same limits (MpiGroup::create levels them)
  // and so can validate for the other; outlives the rank.
  RemoteRank(const FrontEnd* local, SendMessage send);
  // Drain first: requests still open would never finish.
  ~RemoteRank() override;

  // What the rank sent. Sinks run on the caller's thread.
  void receive(std::string_view message);
  // The group is gone: every open request finishes with `status`.
  void fail(const Status& status);

  Status validate(const Request& request) const override;
  Result<RequestId> submit(Request request) override;
  void cancel(RequestId id) override;
  // running and waiting are of now, the other counters as of the rank's last message.
  EngineStats stats() const override;
  const EngineOptions& options() const override;
  bool drain(double seconds) override;
  Status health() const override;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// The other process's side: runs on `loop` what arrives.
class RankServer {
 public:
  // `loop` must take whatever comes (EngineOptions::max_queue): the front end bounds what is open,
  // and knows of an end before this side has counted it.
  RankServer(EngineLoop* loop, SendMessage send);
  void receive(std::string_view message);
  // Sends the engine's counters, if they have changed; they also go with each finished request, but
  // then do not know yet that it is gone.
  void report();

 private:
  class Sink;
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace k3
