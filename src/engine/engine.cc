#include "engine/engine.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <random>
#include <span>
#include <utility>

#include "engine/counter_rng.h"
#include "engine/request_state.h"
#include "engine/sampler.h"
#include "engine/scheduler.h"
#include "engine/validate.h"

namespace k3 {
namespace {

double steady_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

int64_t resolve(int64_t asked, int64_t limit) {
  return asked <= 0 ? limit : std::min(asked, limit);
}

EngineOptions resolve(EngineOptions o, const ExecutorLimits& limits) {
  o.max_model_len = resolve(o.max_model_len, limits.max_positions);
  o.max_num_batched_tokens = resolve(o.max_num_batched_tokens, limits.max_rows);
  // A decoding request takes a row and a row of logits in every step, a prefilling one takes at
  // least one row: with no more requests than rows nobody is ever left out of a step.
  o.max_num_seqs = std::min(
      {resolve(o.max_num_seqs, limits.num_slots), o.max_num_batched_tokens, limits.max_logit_rows});
  o.max_queue = std::clamp<int64_t>(o.max_queue, 0, int64_t{1} << 40);
  std::erase_if(o.end_token_ids, [&](int32_t id) { return id < 0 || id >= limits.vocab_size; });
  if (!o.clock) o.clock = steady_seconds;
  if (!o.seed) {
    std::random_device random;
    o.seed = (static_cast<uint64_t>(random()) << 32) | random();
  }
  return o;
}

bool contains(const std::vector<int32_t>& ids, int32_t id) {
  return std::find(ids.begin(), ids.end(), id) != ids.end();
}

bool is_fatal(ErrorCode code) { return code == ErrorCode::kDevice || code == ErrorCode::kRankLost; }

}  // namespace

struct Engine::Impl {
  Impl(Executor* e, EngineOptions o)
      : executor(e),
        limits(e->limits()),
        options(resolve(std::move(o), limits)),
        scheduler(options.max_num_seqs, options.max_num_batched_tokens, limits.num_slots,
                  limits.num_pages) {}

  // A request's life, in order.
  void enqueue(RequestId id, Request request, double submitted_at);
  Status run(std::span<const PlannedSegment> plan);
  Status blame(std::span<const PlannedSegment> plan, const Status& error);
  void take_in(const PlannedSegment& segment);
  void next_token(RequestState* r, std::span<const float> logits);
  void finish(RequestState* r, FinishReason reason, int32_t stop_token, Status error);

  void sweep_cancelled();
  void finish_all(FinishReason reason, const Status& error);

  Executor* executor;
  const ExecutorLimits limits;
  const EngineOptions options;
  Scheduler scheduler;
  Sampler sampler;
  std::map<RequestId, std::unique_ptr<RequestState>> requests;  // queued and running
  RequestId last_id = 0;
  EngineStats counters;
  Status fatal;  // not ok: nothing runs any more

  // A sink may cancel from inside a call of ours. Nothing is then taken apart under our feet: the
  // request is only marked, and swept when the outermost call ends.
  bool busy = false;
  std::vector<RequestId> to_cancel;
};

// ---- queued

Status queue_is_full(const EngineOptions& options) {
  return {ErrorCode::kUnavailable, cat("the queue is full: ", options.max_open(),
                                       " requests are running or waiting; try again later")};
}

Status Engine::validate(const Request& request) const {
  const EngineOptions& o = impl_->options;
  if (o.max_num_seqs < 1) {
    return {ErrorCode::kInternal, cat("the executor can run no request: ", impl_->limits.num_slots,
                                      " slots, ", impl_->limits.max_rows, " rows, ",
                                      impl_->limits.max_logit_rows, " rows of logits in a step")};
  }
  return validate_request(request, o, impl_->limits);
}

Result<RequestId> Engine::submit(Request request) {
  K3_RETURN_IF_ERROR(validate(request));
  if (!request.sink) return invalid_argument("sink: none, expected one to send the output to");
  if (!impl_->fatal.ok()) {
    return Status(ErrorCode::kUnavailable, cat("the engine has stopped: ", impl_->fatal.message()));
  }
  if (static_cast<int64_t>(impl_->requests.size()) >= impl_->options.max_open()) {
    return queue_is_full(impl_->options);
  }
  const RequestId id = ++impl_->last_id;
  impl_->enqueue(id, std::move(request), impl_->options.clock());
  return id;
}

void Engine::enqueue(RequestId id, Request request, double submitted_at) {
  impl_->enqueue(id, std::move(request), submitted_at);
}

void Engine::Impl::enqueue(RequestId id, Request request, double submitted_at) {
  const SamplingParams& params = request.sampling;
  const uint64_t seed = params.seed ? *params.seed : counter_bits(*options.seed, id);
  SamplerState state(params, request.prompt, options.end_token_ids, seed);
  auto owned =
      std::make_unique<RequestState>(id, std::move(request), std::move(state), submitted_at);
  RequestState* r = owned.get();
  requests.emplace(id, std::move(owned));
  scheduler.enqueue(r);
  if (!fatal.ok()) finish(r, FinishReason::kError, -1, fatal);
}

// ---- admitted, prefilling, decoding

void Engine::admit() { impl_->scheduler.admit(); }

Result<bool> Engine::step() {
  if (!impl_->fatal.ok()) return impl_->fatal;
  impl_->scheduler.admit();
  const std::vector<PlannedSegment> plan = impl_->scheduler.plan();
  if (!plan.empty()) {
    ++impl_->counters.steps;
    impl_->busy = true;
    const Status status = impl_->run(plan);
    impl_->busy = false;
    if (!status.ok()) {
      impl_->fatal = status;
      fail_all(status);
      return status;
    }
    impl_->sweep_cancelled();
  }
  return !impl_->requests.empty();
}

Status Engine::pad() {
  if (!impl_->fatal.ok()) return impl_->fatal;
  StepResult result;
  Status status = impl_->executor->step({}, &result);
  if (!status.ok()) {
    impl_->fatal = status;
    fail_all(status);
  }
  return status;
}

// One executor step for `plan` and what follows from it for each request. An error is fatal.
Status Engine::Impl::run(std::span<const PlannedSegment> plan) {
  StepBatch batch;
  batch.segments.reserve(plan.size());
  int64_t num_rows = 0;
  const double now = options.clock();
  for (const PlannedSegment& p : plan) {
    RequestState* r = p.request;
    if (r->scheduled_at < 0) r->scheduled_at = now;
    const int32_t* tokens =
        r->phase == Phase::kDecode ? &r->last_token : r->request.prompt.data() + r->num_computed;
    batch.segments.push_back({.slot = r->slot,
                              .position = r->num_computed,
                              .tokens = {tokens, static_cast<size_t>(p.num_tokens)},
                              .pages = r->pages,
                              .logits = p.logits});
    num_rows += p.logits == Logits::kLast ? 1 : 0;
  }

  StepResult result;
  const Status status = executor->step(batch, &result);
  if (!status.ok()) return is_fatal(status.code()) ? status : blame(plan, status);
  // A step without rows of logits may leave vocab_size unset.
  if (result.num_rows != num_rows || (num_rows > 0 && result.vocab_size != limits.vocab_size) ||
      static_cast<int64_t>(result.logits.size()) < num_rows * limits.vocab_size) {
    return {ErrorCode::kInternal,
            cat("executor returned ", result.num_rows, " rows of ", result.vocab_size,
                " logits, expected ", num_rows, " rows of ", limits.vocab_size)};
  }

  int64_t row = 0;
  for (const PlannedSegment& p : plan) {
    take_in(p);
    if (p.logits == Logits::kNone) continue;
    const std::span<const float> logits = result.row(row++);
    if (!p.request->cancelled) next_token(p.request, logits);
  }
  return {};
}

// The step failed and, by the executor's promise, changed nothing: run its segments one at a time.
// A row stands alone, so those that succeed get the very tokens they would have got; those that
// fail have earned it and fail alone.
Status Engine::Impl::blame(std::span<const PlannedSegment> plan, const Status& error) {
  if (plan.size() > 1) {
    for (const PlannedSegment& p : plan) {
      if (!p.request->cancelled) K3_RETURN_IF_ERROR(run({&p, 1}));
    }
    return {};
  }
  RequestState* r = plan[0].request;
  finish(r, FinishReason::kError, -1,
         {error.code(), cat("request ", r->id, ", ", plan[0].num_tokens, " token(s) at position ",
                            r->num_computed, ": ", error.message())});
  return {};
}

// The executor now holds the segment's tokens.
void Engine::Impl::take_in(const PlannedSegment& segment) {
  RequestState* r = segment.request;
  r->num_computed += segment.num_tokens;
  if (r->phase != Phase::kPrefill) return;
  counters.prompt_tokens += segment.num_tokens;
  if (r->num_computed == r->prompt_size()) r->phase = Phase::kDecode;
}

// ---- a token, and perhaps the end

void Engine::Impl::next_token(RequestState* r, std::span<const float> logits) {
  Sample sample;
  if (const Status status = sampler.sample(logits, r->sampler, &sample); !status.ok()) {
    finish(r, FinishReason::kError, -1,
           {status.code(),
            cat("request ", r->id, ", position ", r->num_computed - 1, ": ", status.message())});
    return;
  }
  const int32_t token = sample.token;
  r->sampler.accept(token);
  r->last_token = token;
  ++r->num_generated;
  ++counters.generated_tokens;
  if (r->first_token_at < 0) r->first_token_at = options.clock();

  const SamplingParams& params = r->request.sampling;
  const bool end_id = contains(options.end_token_ids, token);
  const bool stop_id = contains(params.stop_token_ids, token);
  const bool go_on = r->request.sink->on_token(
      {.token = token, .is_end = end_id || stop_id, .chosen = sample.chosen, .top = sample.top});

  if (r->cancelled) return;  // the sink did it; swept after the step
  if (stop_id || (end_id && !params.ignore_eos)) {
    finish(r, FinishReason::kStop, token, {});
  } else if (!go_on) {
    finish(r, FinishReason::kStop, -1, {});
  } else if (r->num_generated == params.max_tokens) {
    finish(r, FinishReason::kLength, -1, {});
  }
}

// Slot and pages are free and the request is forgotten before its sink hears of it.
void Engine::Impl::finish(RequestState* r, FinishReason reason, int32_t stop_token, Status error) {
  scheduler.remove(r);
  auto node = requests.extract(r->id);
  switch (reason) {
    case FinishReason::kStop:
      ++counters.finished_stop;
      break;
    case FinishReason::kLength:
      ++counters.finished_length;
      break;
    case FinishReason::kCancelled:
      ++counters.finished_cancelled;
      break;
    case FinishReason::kError:
      ++counters.finished_error;
      break;
  }
  const double now = options.clock();
  FinishInfo info;
  info.reason = reason;
  info.stop_token = stop_token;
  info.error = std::move(error);
  info.stats.prompt_tokens = r->prompt_size();
  info.stats.completion_tokens = r->num_generated;
  info.stats.queue_seconds = (r->scheduled_at < 0 ? now : r->scheduled_at) - r->submitted_at;
  info.stats.ttft_seconds = r->first_token_at < 0 ? 0 : r->first_token_at - r->submitted_at;
  info.stats.total_seconds = now - r->submitted_at;

  const bool was_busy = std::exchange(busy, true);
  r->request.sink->on_finish(info);
  busy = was_busy;
}

// ---- ended from outside

void Engine::cancel(RequestId id) {
  const auto it = impl_->requests.find(id);
  if (it == impl_->requests.end() || it->second->cancelled) return;
  it->second->cancelled = true;
  impl_->to_cancel.push_back(id);
  if (!impl_->busy) impl_->sweep_cancelled();
}

void Engine::Impl::sweep_cancelled() {
  while (!to_cancel.empty()) {
    const RequestId id = to_cancel.back();
    to_cancel.pop_back();
    const auto it = requests.find(id);
    if (it != requests.end()) finish(it->second.get(), FinishReason::kCancelled, -1, {});
  }
}

void Engine::fail_all(const Status& error) { impl_->finish_all(FinishReason::kError, error); }

void Engine::cancel_all() { impl_->finish_all(FinishReason::kCancelled, {}); }

void Engine::Impl::finish_all(FinishReason reason, const Status& error) {
  while (!requests.empty()) finish(requests.begin()->second.get(), reason, -1, error);
  to_cancel.clear();
}

Engine::Engine(Executor* executor, EngineOptions options)
    : impl_(std::make_unique<Impl>(executor, std::move(options))) {}

Engine::~Engine() { cancel_all(); }

EngineStats Engine::stats() const {
  EngineStats stats = impl_->counters;
  stats.running = impl_->scheduler.num_running();
  stats.waiting = impl_->scheduler.num_waiting();
  stats.slots_free = impl_->scheduler.slots().num_free();
  stats.pages_free = impl_->scheduler.pages().num_free();
  stats.pages_total = impl_->scheduler.pages().total();
  return stats;
}

const EngineOptions& Engine::options() const { return impl_->options; }

}  // namespace k3
