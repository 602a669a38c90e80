#include "engine/engine_loop.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace k3 {
namespace {

struct Submission {
  RequestId id;
  Request request;
  double at;
};

// What other threads have asked for since the engine's thread last looked. A request's cancellation
// always comes after its submission, so submissions first, cancellations second keeps the order.
struct Inbox {
  std::vector<Submission> submissions;
  std::vector<RequestId> cancellations;
  bool empty() const { return submissions.empty() && cancellations.empty(); }
};

}  // namespace

struct EngineLoop::Impl {
  Impl(Executor* executor, EngineOptions options)
      : engine(executor, std::move(options)),
        peers(executor->peers()),
        published(engine.stats()),
        thread([this] { run(); }) {
    if (peers == nullptr) return;
    peers->on_change([this] {
      std::lock_guard lock(mutex);
      wake.notify_one();
    });
    std::lock_guard lock(mutex);
    wake.notify_one();  // a peer may have begun before anybody listened
  }

  void run();
  void apply(Inbox asked);
  void publish(bool now_idle, const Status& status);
  Status refusal() const;  // with mutex held

  // The engine's thread alone touches the engine; validate() and options() only read what never
  // changes.
  Engine engine;
  StepPeers* const peers;  // null: none

  mutable std::mutex mutex;
  std::condition_variable wake;     // the engine's thread: inbox, or stop
  std::condition_variable settled;  // drain: idle
  // All below under the mutex.
  Inbox inbox;
  int64_t unpublished = 0;  // submissions not yet counted in `published`
  int64_t in_apply = 0;     // of those, taken from the inbox
  RequestId last_id = 0;
  bool draining = false, cancel_all = false, stop = false;
  bool idle = true;  // nothing in the inbox, queued or running
  EngineStats published;
  Status health;

  std::thread thread;  // last: starts when all else is there
};

void EngineLoop::Impl::run() {
  bool work_left = false, health_ok = true;
  for (;;) {
    Inbox asked;
    bool cancel_rest = false;
    {
      std::unique_lock lock(mutex);
      wake.wait(lock, [&] {
        return work_left || stop || cancel_all || !inbox.empty() ||
               (peers != nullptr && health.ok() && peers->waiting());
      });
      std::swap(asked, inbox);
      in_apply = unpublished;
      cancel_rest = std::exchange(cancel_all, false) || stop;
    }
    apply(std::move(asked));
    if (cancel_rest) engine.cancel_all();
    engine.admit();
    publish(false, {});

    // A rank with nothing to run steps for those that wait for it, and for nobody else: when the
    // whole group is idle, no rank makes a call.
    const EngineStats before = engine.stats();
    const bool idle_rank = before.running == 0 && before.waiting == 0;
    Result<bool> result = false;
    if (idle_rank && peers != nullptr && health_ok && !cancel_rest && peers->waiting()) {
      if (const Status padded = engine.pad(); !padded.ok()) result = padded;
    } else {
      result = engine.step();
    }
    health_ok = health_ok && result.ok();
    work_left = result.ok() && result.value();
    publish(!work_left, result.status());
    std::lock_guard lock(mutex);
    if (stop && inbox.empty() && !work_left) return;
  }
}

void EngineLoop::Impl::apply(Inbox asked) {
  for (Submission& s : asked.submissions) engine.enqueue(s.id, std::move(s.request), s.at);
  for (RequestId id : asked.cancellations) engine.cancel(id);
}

void EngineLoop::Impl::publish(bool now_idle, const Status& status) {
  const EngineStats stats = engine.stats();
  std::lock_guard lock(mutex);
  published = stats;
  unpublished -= std::exchange(in_apply, 0);
  if (!status.ok()) health = status;
  idle = now_idle && inbox.empty();
  if (idle) settled.notify_all();
}

Status EngineLoop::Impl::refusal() const {
  if (!health.ok()) {
    return {ErrorCode::kUnavailable, cat("the engine has stopped: ", health.message())};
  }
  if (draining || stop) return {ErrorCode::kUnavailable, "the server is shutting down"};
  return {};
}

EngineLoop::EngineLoop(Executor* executor, EngineOptions options)
    : impl_(std::make_unique<Impl>(executor, std::move(options))) {}

EngineLoop::~EngineLoop() {
  {
    std::lock_guard lock(impl_->mutex);
    impl_->stop = true;
  }
  impl_->wake.notify_one();
  impl_->thread.join();
  if (impl_->peers != nullptr) impl_->peers->on_change({});
}

Status EngineLoop::validate(const Request& request) const {
  K3_RETURN_IF_ERROR(impl_->engine.validate(request));
  std::lock_guard lock(impl_->mutex);
  return impl_->refusal();
}

Result<RequestId> EngineLoop::submit(Request request) {
  K3_RETURN_IF_ERROR(impl_->engine.validate(request));
  if (!request.sink) return invalid_argument("sink: none, expected one to send the output to");
  const EngineOptions& options = impl_->engine.options();
  const double now = options.clock();
  RequestId id = 0;
  {
    std::lock_guard lock(impl_->mutex);
    K3_RETURN_IF_ERROR(impl_->refusal());
    const EngineStats& known = impl_->published;
    if (known.running + known.waiting + impl_->unpublished >= options.max_open()) {
      return queue_is_full(options);
    }
    id = ++impl_->last_id;
    impl_->inbox.submissions.push_back({id, std::move(request), now});
    ++impl_->unpublished;
    impl_->idle = false;
  }
  impl_->wake.notify_one();
  return id;
}

void EngineLoop::cancel(RequestId id) {
  {
    std::lock_guard lock(impl_->mutex);
    impl_->inbox.cancellations.push_back(id);
  }
  impl_->wake.notify_one();
}

EngineStats EngineLoop::stats() const {
  std::lock_guard lock(impl_->mutex);
  EngineStats stats = impl_->published;
  stats.waiting += impl_->unpublished;
  return stats;
}

const EngineOptions& EngineLoop::options() const { return impl_->engine.options(); }

bool EngineLoop::drain(double seconds) {
  std::unique_lock lock(impl_->mutex);
  impl_->draining = true;
  const auto done = [&] { return impl_->idle; };
  // Past about 30 years a duration no longer fits the clock.
  const std::chrono::duration<double> patience(seconds > 0 ? std::min(seconds, 1e9) : 0.0);
  if (impl_->settled.wait_for(lock, patience, done)) return true;
  impl_->cancel_all = true;
  impl_->wake.notify_one();
  impl_->settled.wait(lock, done);
  return false;
}

Status EngineLoop::health() const {
  std::lock_guard lock(impl_->mutex);
  return impl_->health;
}

}  // namespace k3
