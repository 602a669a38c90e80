#include "server/generation_job.h"

#include <algorithm>

#include "server/log.h"
#include "server/schema.h"

namespace k3 {

class GenerationJob::Sink : public TokenSink {
 public:
  Sink(std::shared_ptr<GenerationJob> job, size_t index) : job_(std::move(job)), index_(index) {}
  bool on_token(const TokenOutput& token) override {
    std::lock_guard lock(job_->choices_mutex_);
    return job_->on_token(index_, token);
  }
  void on_finish(const FinishInfo& info) override {
    std::lock_guard lock(job_->choices_mutex_);
    job_->on_finish(index_, info);
  }

 private:
  const std::shared_ptr<GenerationJob> job_;
  const size_t index_;
};

GenerationJob::GenerationJob(FrontEnd* engine, std::shared_ptr<const Tokenizer> tokenizer,
                             GenerationSpec spec, std::shared_ptr<Exchange> exchange,
                             std::shared_ptr<Metrics> metrics)
    : engine_(engine),
      tokenizer_(std::move(tokenizer)),
      spec_(std::move(spec)),
      exchange_(std::move(exchange)),
      metrics_(std::move(metrics)) {
  choices_.reserve(spec_.prompts.size() * static_cast<size_t>(spec_.n));
  for (const GenerationSpec::Prompt& prompt : spec_.prompts) {
    for (int64_t k = 0; k < spec_.n; ++k) {
      PipelineOptions options = spec_.pipeline;
      options.text_offset =
          static_cast<int64_t>(std::count_if(prompt.echo.begin(), prompt.echo.end(), [](char c) {
            return (static_cast<unsigned char>(c) & 0xC0) != 0x80;
          }));
      choices_.emplace_back(ChoicePipeline(tokenizer_, std::move(options)));
      choices_.back().result.content = prompt.echo;
    }
  }
}

GenerationJob::~GenerationJob() = default;

void GenerationJob::start() {
  const auto n = static_cast<size_t>(spec_.n);
  auto request_of = [&](size_t index) {
    const GenerationSpec::Prompt& prompt = spec_.prompts[index / n];
    Request request;
    request.prompt = prompt.ids;
    request.sampling = spec_.sampling;
    request.sampling.max_tokens = prompt.max_tokens;
    request.sampling.seed = seed_of_choice(spec_.sampling, static_cast<int64_t>(index % n));
    request.rank = spec_.rank;
    return request;
  };
  // All are checked before any runs.
  for (size_t p = 0; p < spec_.prompts.size(); ++p) {
    if (Status status = engine_->validate(request_of(p * n)); !status.ok()) {
      dead_ = true;
      return exchange_->reply_error(to_api_error(status));
    }
  }
  const auto choices = static_cast<int64_t>(choices_.size());
  const int64_t room = spec_.rank < 0 ? engine_->max_open() : engine_->options().max_open();
  if (choices > room) {
    dead_ = true;
    return exchange_->reply_error(
        to_api_error(invalid_argument(spec_.n > 1 ? "n" : "prompt", ": found ", choices,
                                      " choices in one request, expected at most ", room,
                                      " (what may decode and wait at once)")));
  }
  // The job may be over before the IO thread says so: what is counted does not depend on it.
  exchange_->on_disconnect([weak = weak_from_this(), metrics = metrics_](bool slow) {
    ++(slow ? metrics->slow_readers : metrics->disconnects);
    if (auto job = weak.lock()) job->gone(slow);
  });
  for (size_t i = 0; i < choices_.size() && !dead_; ++i) {
    Request request = request_of(i);
    request.sink = std::make_shared<Sink>(shared_from_this(), i);
    Result<RequestId> id = engine_->submit(std::move(request));
    if (!id.ok()) {
      return fail(to_api_error(id.status()));
    }
    bool late = false;
    {
      std::lock_guard lock(mutex_);
      ids_.push_back(*id);
      late = dead_;  // cancel_all may have run before this id was known
    }
    if (late) engine_->cancel(*id);
  }
  std::string early;
  {
    std::lock_guard lock(mutex_);
    open_ = true;
    early.swap(early_);
    if (early.empty() || dead_) return;
    if (!begun_) exchange_->begin_events();
    begun_ = true;
    if (!exchange_->write(std::move(early))) too_slow();
    if (ended_) exchange_->end();
  }
}

bool GenerationJob::on_token(size_t index, const TokenOutput& token) {
  if (dead_) return false;
  Choice& choice = choices_[index];
  const std::vector<Delta> deltas = choice.pipeline.push(token);
  take(index, deltas, nullptr);
  return !choice.pipeline.stopped() && !dead_;
}

void GenerationJob::on_finish(size_t index, const FinishInfo& info) {
  Choice& choice = choices_[index];
  choice.info = info;
  choice.finished = true;
  ++finished_;
  if (info.reason == FinishReason::kError) {
    fail(to_api_error(info.error));
    metrics_->count_choice(info, "error");
  } else if (info.reason == FinishReason::kCancelled || dead_) {
    // Nobody asked for it over HTTP: the engine is shutting down.
    fail({503, "the request was cancelled: the server is shutting down", "service_unavailable", "",
          "cancelled"});
    metrics_->count_choice(info, "cancelled");
  } else {
    Ending& ending = choice.result.ending;
    const std::vector<Delta> deltas = choice.pipeline.finish();
    ending.finish_reason = choice.pipeline.finish_reason(info.reason);
    const auto& stop_ids = spec_.sampling.stop_token_ids;
    if (choice.pipeline.matched_stop() >= 0) {
      ending.stop_reason = spec_.pipeline.stop[static_cast<size_t>(choice.pipeline.matched_stop())];
    } else if (info.reason == FinishReason::kStop &&
               std::find(stop_ids.begin(), stop_ids.end(), info.stop_token) != stop_ids.end()) {
      ending.stop_reason = info.stop_token;
    }
    metrics_->count_choice(info, ending.finish_reason);
    take(index, deltas, &ending);
  }
  if (finished_ == choices_.size()) complete();
}

void GenerationJob::take(size_t index, const std::vector<Delta>& deltas, const Ending* ending) {
  Choice& choice = choices_[index];
  if (!spec_.stream) {
    for (const Delta& delta : deltas) choice.result.add(delta);
    for (LogprobEntry& e : choice.pipeline.take_logprobs()) {
      choice.result.logprobs.push_back(std::move(e));
    }
    return;
  }
  if (deltas.empty() && ending == nullptr && choice.begun) return;
  // The first frame goes out with the first token, whatever it says: it is what TTFT is measured
  // by.
  std::string frames;
  FrameParts parts;
  parts.index = static_cast<int64_t>(index);
  Usage so_far;
  if (spec_.continuous_usage_stats) {
    for (const auto& prompt : spec_.prompts) {
      so_far.prompt_tokens += static_cast<int64_t>(prompt.ids.size());
    }
    for (const Choice& c : choices_) so_far.completion_tokens += c.pipeline.tokens();
    parts.usage = &so_far;
  }
  if (!choice.begun) {
    choice.begun = true;
    if (spec_.meta.chat) {
      parts.role = true;
      frames += choice_frame(spec_.meta, *tokenizer_, parts);
      parts.role = false;
    } else if (!choice.result.content.empty()) {
      frames += text_frame(spec_.meta, parts.index, choice.result.content);
    }
  }
  std::vector<LogprobEntry> logprobs;
  if (spec_.pipeline.logprobs && (!deltas.empty() || ending != nullptr)) {
    logprobs = choice.pipeline.take_logprobs();
    parts.logprobs = &logprobs;
  }
  for (const Delta& delta : deltas) {
    parts.delta = &delta;
    frames += choice_frame(spec_.meta, *tokenizer_, parts);
    parts.logprobs = nullptr;
  }
  if (ending != nullptr) {
    parts.delta = nullptr;
    parts.ending = ending;
    frames += choice_frame(spec_.meta, *tokenizer_, parts);
  }
  send_frames(std::move(frames));
}

void GenerationJob::send_frames(std::string frames) {
  if (frames.empty() || dead_) return;
  std::lock_guard lock(mutex_);
  if (!open_) {
    early_ += frames;
    return;
  }
  if (!begun_) exchange_->begin_events();
  begun_ = true;
  if (!exchange_->write(std::move(frames))) too_slow();
}

// With mutex_ held: the client is so far behind that its connection was closed.
void GenerationJob::too_slow() {
  dead_ = true;
  why_dead_ = "slow_client";
}

void GenerationJob::fail(const ApiError& error) {
  {
    std::lock_guard lock(mutex_);
    if (dead_) return;
    dead_ = true;
    why_dead_ = error.code == "cancelled" ? "cancelled" : "error";
    if (begun_) {
      exchange_->write(error_frame(error));
      exchange_->end();
    } else {
      exchange_->reply_error(error);
    }
  }
  cancel_all();
}

void GenerationJob::gone(bool slow) {
  {
    std::lock_guard lock(mutex_);
    dead_ = true;
    why_dead_ = slow ? "slow_client" : "disconnected";
  }
  cancel_all();
}

void GenerationJob::cancel_all() {
  std::vector<RequestId> ids;
  {
    std::lock_guard lock(mutex_);
    ids = ids_;
  }
  for (RequestId id : ids) engine_->cancel(id);
}

// On the engine's thread, after the last choice.
void GenerationJob::complete() {
  bool dead = false;
  {
    std::lock_guard lock(mutex_);
    dead = dead_;
  }
  if (dead) return log(why_dead_);
  std::string finish;
  for (const Choice& c : choices_) {
    const std::string& reason = c.result.ending.finish_reason;
    if (finish.find(reason) == std::string::npos) finish += (finish.empty() ? "" : ",") + reason;
  }
  if (spec_.stream) {
    std::string last = spec_.include_usage ? usage_frame(spec_.meta, usage()) : "";
    send_frames(last + kDoneFrame);
    std::lock_guard lock(mutex_);
    ended_ = true;
    if (begun_ && !dead_) exchange_->end();
  } else {
    std::vector<ChoiceResult> results;
    for (Choice& c : choices_) results.push_back(std::move(c.result));
    HttpReply reply;
    reply.body = answer_body(spec_.meta, *tokenizer_, spec_.pipeline.logprobs, results, usage());
    exchange_->reply(std::move(reply));
  }
  log(finish);
}

Usage GenerationJob::usage() const {
  Usage out;
  for (const auto& prompt : spec_.prompts) {
    out.prompt_tokens += static_cast<int64_t>(prompt.ids.size());
  }
  for (const Choice& c : choices_) out.completion_tokens += c.info.stats.completion_tokens;
  return out;
}

// One line a request, never its text.
void GenerationJob::log(const std::string& finish) const {
  const Usage total = usage();
  double ttft = 0, seconds = 0;
  for (const Choice& c : choices_) {
    if (c.info.stats.ttft_seconds > 0 && (ttft == 0 || c.info.stats.ttft_seconds < ttft)) {
      ttft = c.info.stats.ttft_seconds;
    }
    seconds = std::max(seconds, c.info.stats.total_seconds);
  }
  const double decode = seconds - ttft;
  const double rate = decode > 0 ? static_cast<double>(total.completion_tokens) / decode : 0;
  server_log().info(
      "request {} id={} choices={} prompt_tokens={} completion_tokens={} ttft={:.3f}s "
      "total={:.3f}s "
      "tok/s={:.1f} finish={}",
      exchange_->request_id(), spec_.meta.id, choices_.size(), total.prompt_tokens,
      total.completion_tokens, ttft, seconds, rate, finish);
}

}  // namespace k3
