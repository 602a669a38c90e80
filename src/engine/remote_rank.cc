#include "engine/remote_rank.h"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <nlohmann/json.hpp>
#include <unordered_map>
#include <utility>

namespace k3 {
namespace {

using Json = nlohmann::json;

// MessagePack: floats keep their bits (a float widens to double and back unharmed).
std::string pack(const Json& message) {
  const std::vector<uint8_t> bytes = Json::to_msgpack(message);
  return {bytes.begin(), bytes.end()};
}
Json unpack(std::string_view bytes) {
  return Json::from_msgpack(bytes.begin(), bytes.end(), true, /*allow_exceptions=*/false);
}

Json to_json(const SamplingParams& s) {
  Json j{{"temperature", s.temperature},
         {"top_k", s.top_k},
         {"top_p", s.top_p},
         {"min_p", s.min_p},
         {"presence_penalty", s.presence_penalty},
         {"frequency_penalty", s.frequency_penalty},
         {"repetition_penalty", s.repetition_penalty},
         {"logit_bias", s.logit_bias},
         {"max_tokens", s.max_tokens},
         {"min_tokens", s.min_tokens},
         {"ignore_eos", s.ignore_eos},
         {"stop_token_ids", s.stop_token_ids},
         {"logprobs", s.logprobs}};
  if (s.seed) j["seed"] = *s.seed;
  return j;
}

SamplingParams sampling_from(const Json& j) {
  SamplingParams s;
  s.temperature = j.at("temperature").get<float>();
  s.top_k = j.at("top_k").get<int32_t>();
  s.top_p = j.at("top_p").get<float>();
  s.min_p = j.at("min_p").get<float>();
  s.presence_penalty = j.at("presence_penalty").get<float>();
  s.frequency_penalty = j.at("frequency_penalty").get<float>();
  s.repetition_penalty = j.at("repetition_penalty").get<float>();
  s.logit_bias = j.at("logit_bias").get<std::vector<std::pair<int32_t, float>>>();
  s.max_tokens = j.at("max_tokens").get<int64_t>();
  s.min_tokens = j.at("min_tokens").get<int64_t>();
  s.ignore_eos = j.at("ignore_eos").get<bool>();
  s.stop_token_ids = j.at("stop_token_ids").get<std::vector<int32_t>>();
  s.logprobs = j.at("logprobs").get<int32_t>();
  if (j.contains("seed")) s.seed = j.at("seed").get<uint64_t>();
  return s;
}

Json to_json(const TokenLogprob& l) { return Json::array({l.token, l.logprob, l.rank}); }
TokenLogprob logprob_from(const Json& j) {
  return {j.at(0).get<int32_t>(), j.at(1).get<float>(), j.at(2).get<int32_t>()};
}

Json to_json(const EngineStats& s) {
  return Json::array({s.slots_free, s.pages_free, s.pages_total, s.steps, s.prompt_tokens,
                      s.generated_tokens, s.finished_stop, s.finished_length, s.finished_cancelled,
                      s.finished_error});
}
EngineStats stats_from(const Json& j) {
  EngineStats s;
  size_t at = 0;
  for (int64_t* field : {&s.slots_free, &s.pages_free, &s.pages_total, &s.steps, &s.prompt_tokens,
                         &s.generated_tokens, &s.finished_stop, &s.finished_length,
                         &s.finished_cancelled, &s.finished_error}) {
    *field = j.at(at++).get<int64_t>();
  }
  return s;
}

Json to_json(const FinishInfo& f) {
  return {
      {"reason", static_cast<int>(f.reason)},     {"stop_token", f.stop_token},
      {"code", static_cast<int>(f.error.code())}, {"error", f.error.message()},
      {"prompt_tokens", f.stats.prompt_tokens},   {"completion_tokens", f.stats.completion_tokens},
      {"queue_seconds", f.stats.queue_seconds},   {"ttft_seconds", f.stats.ttft_seconds},
      {"total_seconds", f.stats.total_seconds}};
}
FinishInfo finish_from(const Json& j) {
  FinishInfo f;
  f.reason = static_cast<FinishReason>(j.at("reason").get<int>());
  f.stop_token = j.at("stop_token").get<int32_t>();
  if (const int code = j.at("code").get<int>(); code != 0) {
    f.error = {static_cast<ErrorCode>(code), j.at("error").get<std::string>()};
  }
  f.stats = {j.at("prompt_tokens").get<int64_t>(), j.at("completion_tokens").get<int64_t>(),
             j.at("queue_seconds").get<double>(), j.at("ttft_seconds").get<double>(),
             j.at("total_seconds").get<double>()};
  return f;
}

}  // namespace

// ---- the front end's side ----

struct RemoteRank::Impl {
  struct Open {
    std::shared_ptr<TokenSink> sink;
    int64_t tokens = 0;    // delivered
    bool stopped = false;  // the sink has seen its stop string: what follows is not for it
  };

  const FrontEnd* local;
  SendMessage send;
  mutable std::mutex mutex;
  std::condition_variable settled;
  // An entry leaves only on the thread that calls receive(), or by fail().
  std::unordered_map<RequestId, Open> open;
  RequestId last_id = 0;
  EngineStats last_stats;
  bool draining = false;
  Status failure;

  void receive(const Json& m);
  void on_token(RequestId id, const Json& m);
  void on_finish(RequestId id, const Json& m);
};

RemoteRank::RemoteRank(const FrontEnd* local, SendMessage send) : impl_(std::make_unique<Impl>()) {
  impl_->local = local;
  impl_->send = std::move(send);
  const EngineStats mine = local->stats();  // the limits are the same
  impl_->last_stats.slots_free = mine.slots_free;
  impl_->last_stats.pages_free = impl_->last_stats.pages_total = mine.pages_total;
}

RemoteRank::~RemoteRank() = default;

// A message that does not read is a fault of the group, not of one request.
void RemoteRank::receive(std::string_view message) {
  try {
    impl_->receive(unpack(message));
  } catch (const Json::exception& e) {
    fail({ErrorCode::kRankLost, cat("a message from another rank cannot be read: ", e.what())});
  }
}

void RemoteRank::Impl::receive(const Json& m) {
  const auto id = m.at("id").get<RequestId>();
  if (m.contains("stats")) {
    std::lock_guard lock(mutex);
    last_stats = stats_from(m.at("stats"));
  }
  if (m.contains("token")) on_token(id, m);
  if (m.contains("reason")) on_finish(id, m);
}

void RemoteRank::Impl::on_token(RequestId id, const Json& m) {
  std::shared_ptr<TokenSink> sink;
  {
    std::lock_guard lock(mutex);
    const auto it = open.find(id);
    if (it == open.end() || it->second.stopped) return;
    sink = it->second.sink;
    ++it->second.tokens;
  }
  TokenOutput t;
  std::vector<TokenLogprob> top;
  t.token = m.at("token").get<int32_t>();
  t.is_end = m.at("is_end").get<bool>();
  if (m.contains("chosen")) {
    t.chosen = logprob_from(m.at("chosen"));
    for (const Json& l : m.at("top")) top.push_back(logprob_from(l));
    t.top = top;
  }
  // Without the lock: a sink may cancel.
  if (sink->on_token(t)) return;
  std::lock_guard lock(mutex);
  if (const auto it = open.find(id); it != open.end()) it->second.stopped = true;
  send(pack({{"cancel", id}}));
}

void RemoteRank::Impl::on_finish(RequestId id, const Json& m) {
  Open request;
  {
    std::lock_guard lock(mutex);
    const auto it = open.find(id);
    if (it == open.end()) return;
    request = it->second;
  }
  FinishInfo info = finish_from(m);
  if (request.stopped && info.reason != FinishReason::kError) {
    info.reason = FinishReason::kStop;
    info.stop_token = -1;
    info.stats.completion_tokens = request.tokens;
  }
  request.sink->on_finish(info);
  std::lock_guard lock(mutex);
  open.erase(id);
  settled.notify_all();
}

void RemoteRank::fail(const Status& status) {
  std::unordered_map<RequestId, Impl::Open> rest;
  {
    std::lock_guard lock(impl_->mutex);
    if (impl_->failure.ok()) impl_->failure = status;
    rest.swap(impl_->open);
  }
  FinishInfo info;
  info.reason = FinishReason::kError;
  info.error = status;
  for (auto& [id, request] : rest) request.sink->on_finish(info);
  std::lock_guard lock(impl_->mutex);
  impl_->settled.notify_all();
}

Status RemoteRank::validate(const Request& request) const {
  K3_RETURN_IF_ERROR(impl_->local->validate(request));
  return health();
}

Result<RequestId> RemoteRank::submit(Request request) {
  K3_RETURN_IF_ERROR(validate(request));
  if (!request.sink) return invalid_argument("sink: none, expected one to send the output to");
  const EngineOptions& limits = options();
  std::lock_guard lock(impl_->mutex);
  if (impl_->draining) return Status(ErrorCode::kUnavailable, "the server is shutting down");
  if (!impl_->failure.ok()) {
    return Status(ErrorCode::kUnavailable,
                  cat("the engine has stopped: ", impl_->failure.message()));
  }
  if (static_cast<int64_t>(impl_->open.size()) >= limits.max_open()) return queue_is_full(limits);
  const RequestId id = ++impl_->last_id;
  impl_->open[id].sink = std::move(request.sink);
  impl_->send(
      pack({{"submit", id}, {"prompt", request.prompt}, {"sampling", to_json(request.sampling)}}));
  return id;
}

void RemoteRank::cancel(RequestId id) { impl_->send(pack({{"cancel", id}})); }

EngineStats RemoteRank::stats() const {
  std::lock_guard lock(impl_->mutex);
  EngineStats s = impl_->last_stats;
  const auto count = static_cast<int64_t>(impl_->open.size());
  s.running = std::min(count, impl_->local->options().max_num_seqs);
  s.waiting = count - s.running;
  return s;
}

const EngineOptions& RemoteRank::options() const { return impl_->local->options(); }

bool RemoteRank::drain(double seconds) {
  std::unique_lock lock(impl_->mutex);
  impl_->draining = true;
  const auto done = [&] { return impl_->open.empty(); };
  const std::chrono::duration<double> patience(seconds > 0 ? std::min(seconds, 1e9) : 0.0);
  if (impl_->settled.wait_for(lock, patience, done)) return true;
  for (const auto& [id, request] : impl_->open) impl_->send(pack({{"cancel", id}}));
  impl_->settled.wait(lock, done);
  return false;
}

Status RemoteRank::health() const {
  std::lock_guard lock(impl_->mutex);
  return impl_->failure;
}

// ---- the other process's side ----

struct RankServer::Impl {
  EngineLoop* loop;
  SendMessage send;
  std::mutex mutex;
  std::unordered_map<RequestId, RequestId> local_ids;  // the front end's -> the loop's
  Json reported;
};

class RankServer::Sink : public TokenSink {
 public:
  Sink(std::shared_ptr<Impl> server, RequestId id, bool logprobs)
      : server_(std::move(server)), id_(id), logprobs_(logprobs) {}

  bool on_token(const TokenOutput& t) override {
    Json m{{"id", id_}, {"token", t.token}, {"is_end", t.is_end}};
    if (logprobs_) {
      m["chosen"] = to_json(t.chosen);
      Json top = Json::array();
      for (const TokenLogprob& l : t.top) top.push_back(to_json(l));
      m["top"] = std::move(top);
    }
    server_->send(pack(m));
    return true;  // stop strings are the front end's business; it cancels
  }

  void on_finish(const FinishInfo& info) override {
    Json m = to_json(info);
    m["id"] = id_;
    m["stats"] = to_json(server_->loop->stats());
    {
      std::lock_guard lock(server_->mutex);
      server_->local_ids.erase(id_);
    }
    server_->send(pack(m));
  }

 private:
  const std::shared_ptr<Impl> server_;
  const RequestId id_;
  const bool logprobs_;
};

RankServer::RankServer(EngineLoop* loop, SendMessage send) : impl_(std::make_shared<Impl>()) {
  impl_->loop = loop;
  impl_->send = std::move(send);
}

void RankServer::report() {
  Json stats = to_json(impl_->loop->stats());
  if (stats == impl_->reported) return;
  impl_->send(pack({{"id", 0}, {"stats", stats}}));
  impl_->reported = std::move(stats);
}

void RankServer::receive(std::string_view message) {
  const Json m = unpack(message);
  if (m.contains("submit")) {
    const auto id = m.at("submit").get<RequestId>();
    Request request;
    request.prompt = m.at("prompt").get<std::vector<int32_t>>();
    request.sampling = sampling_from(m.at("sampling"));
    request.sink = std::make_shared<Sink>(impl_, id, request.sampling.logprobs >= 0);
    // Held over the submission: the request may finish before its id is written down.
    std::lock_guard lock(impl_->mutex);
    const Result<RequestId> local = impl_->loop->submit(std::move(request));
    if (local.ok()) {
      impl_->local_ids[id] = *local;
      return;
    }
    FinishInfo refused;
    refused.reason = FinishReason::kError;
    refused.error = local.status();
    Json out = to_json(refused);
    out["id"] = id;
    impl_->send(pack(out));
    return;
  }
  std::lock_guard lock(impl_->mutex);
  const auto it = impl_->local_ids.find(m.at("cancel").get<RequestId>());
  if (it != impl_->local_ids.end()) impl_->loop->cancel(it->second);
}

}  // namespace k3
