// A generation request on its way through the engine: P prompts times n choices, each an engine
// request of its own, answered as one stream or one body. Choice p * n + k is sample k of prompt p.
// One choice that fails fails the request; a client that leaves cancels them all.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/front_end.h"
#include "server/choice_pipeline.h"
#include "server/exchange.h"
#include "server/metrics.h"
#include "server/wire.h"

namespace k3 {

struct GenerationSpec {
  AnswerMeta meta;
  struct Prompt {
    std::vector<int32_t> ids;
    int64_t max_tokens = 0;
    std::string echo;  // text put before the answer
  };
  std::vector<Prompt> prompts;
  int64_t n = 1;
  SamplingParams sampling;  // max_tokens and seed are set per choice
  int rank = -1;            // the rank to run it (the request's header); -1: the router chooses
  PipelineOptions pipeline;
  bool stream = false, include_usage = false, continuous_usage_stats = false;
};

class GenerationJob : public std::enable_shared_from_this<GenerationJob> {
 public:
  GenerationJob(FrontEnd* engine, std::shared_ptr<const Tokenizer> tokenizer, GenerationSpec spec,
                std::shared_ptr<Exchange> exchange, std::shared_ptr<Metrics> metrics);
  ~GenerationJob();

  // Submits every choice, or answers with the error. Not on the engine's thread.
  void start();
  // Ends all choices and tells the client why. From any thread.
  void cancel(const ApiError& error) { fail(error); }

 private:
  class Sink;
  struct Choice {
    explicit Choice(ChoicePipeline p) : pipeline(std::move(p)) {}
    ChoicePipeline pipeline;
    ChoiceResult result;  // non-streaming; `ending` in both
    FinishInfo info;
    bool begun = false, finished = false;
  };

  bool on_token(size_t index, const TokenOutput& token);
  void on_finish(size_t index, const FinishInfo& info);
  void take(size_t index, const std::vector<Delta>& deltas, const Ending* ending);
  void send_frames(std::string frames);
  void fail(const ApiError& error);
  void gone(bool slow);
  void too_slow();
  void cancel_all();
  void complete();
  void log(const std::string& finish) const;
  Usage usage() const;

  FrontEnd* const engine_;
  const std::shared_ptr<const Tokenizer> tokenizer_;
  GenerationSpec spec_;
  const std::shared_ptr<Exchange> exchange_;
  const std::shared_ptr<Metrics> metrics_;

  // The engine's threads alone touch these once submitted: with several ranks, one at a time.
  std::mutex choices_mutex_;
  std::vector<Choice> choices_;
  size_t finished_ = 0;

  std::atomic<bool> dead_{false};  // nothing more goes to the client
  std::mutex mutex_;               // guards what follows
  std::vector<RequestId> ids_;
  bool open_ = false;   // all choices are submitted: frames may go out
  bool begun_ = false;  // the stream's head has gone out
  bool ended_ = false;  // the last frame is among them
  std::string early_;   // frames before open_
  const char* why_dead_ = "disconnected";
};

}  // namespace k3
