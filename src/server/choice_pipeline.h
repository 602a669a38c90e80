// One choice's way from token ids to what a client reads: detokenise or sort into channels, cut at
// stop strings, pair with logprobs. Streaming sends the deltas as they come, non-streaming adds up
// the same deltas. No engine, no HTTP, no JSON; one thread at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/request.h"
#include "text/output_parser.h"
#include "text/tokenizer.h"

namespace k3 {

struct PipelineOptions {
  bool chat = false;
  bool thinking = false;     // chat: the prompt ended by opening the think channel
  bool return_tools = true;  // chat: false under tool_choice "none": calls are dropped
  std::vector<std::string> stop;
  bool include_stop_str_in_output = false;
  bool skip_special_tokens = true;  // completions
  bool ignore_eos = false;
  int64_t min_tokens = 0;  // stop strings do not count before it
  bool logprobs = false;
  int64_t text_offset = 0;  // completions: characters before the first token (the echoed prompt)
};

struct Delta {
  enum class Kind { kReasoning, kContent, kToolCallBegin, kToolCallArgs };
  Kind kind = Kind::kContent;
  std::string text;     // begin: the tool's name; args: a piece of JSON
  int index = 0;        // of the tool call
  std::string call_id;  // begin: NAME:INDEX
};

struct LogprobEntry {
  struct Candidate {
    int32_t token = 0;
    float logprob = 0;
  };
  Candidate chosen;
  std::vector<Candidate> top;  // by rank
  int64_t text_offset = 0;     // characters of the choice's text before this token
};

class ChoicePipeline {
 public:
  ChoicePipeline(std::shared_ptr<const Tokenizer> tokenizer, PipelineOptions options);
  ~ChoicePipeline();
  ChoicePipeline(ChoicePipeline&&) noexcept;

  // The deltas this token lets out; never an empty piece of text. stopped() may turn true.
  std::vector<Delta> push(const TokenOutput& token);
  // What was held back. Once, last.
  std::vector<Delta> finish();

  // Logprobs of the tokens whose text has been let out since the last call. After finish(): the
  // rest, but none that lies wholly behind a stop string's match.
  std::vector<LogprobEntry> take_logprobs();

  // The request should end: a stop string matched, or the message is closed and goes on regardless.
  bool stopped() const { return stopped_; }
  // Of the stop string that matched, or -1.
  int matched_stop() const { return matched_stop_; }
  int num_tool_calls() const { return num_tool_calls_; }
  int64_t tokens() const { return tokens_; }  // end id included

  // "stop", "length" or "tool_calls"; meaningless for kCancelled and kError.
  const char* finish_reason(FinishReason reason) const;

 private:
  struct Pending {
    LogprobEntry entry;
    int64_t begin = 0, end = 0;  // bytes of text, before stop strings cut it
  };
  void add_text(Delta::Kind kind, std::string text, std::vector<Delta>* out);
  void switch_channel(std::optional<Delta::Kind> channel, std::vector<Delta>* out);
  void emit_text(Delta::Kind kind, std::string text, std::vector<Delta>* out);
  void add_event(OutputEvent event, std::vector<Delta>* out);
  void note_logprob(const TokenOutput& token, int64_t begin, int64_t offset);
  void release_logprobs(bool all);

  const std::shared_ptr<const Tokenizer> tokenizer_;
  const PipelineOptions options_;
  std::unique_ptr<OutputParser> parser_;  // chat
  Utf8Stream utf8_;                       // completions
  std::optional<StopMatcher> matcher_;    // of channel_
  std::optional<Delta::Kind> channel_;
  bool stopped_ = false, finished_ = false, in_tag_ = false;
  int matched_stop_ = -1;
  int num_tool_calls_ = 0;
  int64_t tokens_ = 0;
  int64_t text_bytes_ = 0;  // before stop strings cut it
  int64_t text_chars_ = 0;
  int64_t sent_bytes_ = 0;
  std::vector<Pending> pending_;
  std::vector<LogprobEntry> released_;
};

}  // namespace k3
