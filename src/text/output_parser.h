// The model's output, token by token, sorted into channels. ONE incremental state machine over
// token ids: streaming sends its events as they come, non-streaming adds them up, so the two cannot
// differ. Never fails: structure it does not know becomes plain text of the current channel, and no
// markup reaches a client (docs/text.md#output).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "text/tokenizer.h"

namespace k3 {

struct OutputEvent {
  enum class Kind {
    kReasoning,      // text: a piece of the think channel
    kContent,        // text: a piece of the response channel
    kToolCallBegin,  // index, tool name in `text`
    kToolCallArgs,   // index, a piece of the arguments' JSON in `text`; pieces join to valid JSON
    kToolCallEnd,    // index
  };
  Kind kind;
  std::string text;
  int index = 0;  // of the tool call, zero-based
};

class OutputParser {
 public:
  // `thinking`: the prompt ended by opening the think channel (else response).
  OutputParser(std::shared_ptr<const Tokenizer> tokenizer, bool thinking);
  ~OutputParser();
  OutputParser(OutputParser&&) noexcept;

  // One generated id (end ids included or not, as you like: they yield no text).
  std::vector<OutputEvent> push(int32_t id);
  // At the end of generation: held-back bytes, unfinished calls closed so that their JSON is valid.
  std::vector<OutputEvent> finish();

  int num_tool_calls() const;
  // The model has closed its message: generation may stop (the end id usually follows).
  bool message_closed() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Finds stop strings in a stream of text without leaking a byte of one and without losing what was
// held back. Feed text; get what may be sent. How the text is cut into pieces makes no difference:
// the match that ends first wins, among those the longest, among equals the first given.
class StopMatcher {
 public:
  // `stops` must not be empty strings (the caller refuses them; here they never match).
  explicit StopMatcher(std::vector<std::string> stops, bool include_stop_str_in_output = false);
  // Text that is safe to send now. After a match (matched() >= 0) all further text is dropped.
  std::string push(std::string_view text);
  // End of stream: what was held back.
  std::string flush();
  int matched() const { return matched_; }  // index of the stop string, or -1

 private:
  // One string, and how much of it the text so far ends with (Knuth-Morris-Pratt).
  struct Pattern {
    std::string text;
    std::vector<size_t> border;  // [i] longest proper border of the first i + 1 bytes
    size_t state = 0;
  };
  std::vector<Pattern> patterns_;
  bool include_;
  std::string held_;  // the longest end of the text that may begin a stop string
  int matched_ = -1;
};

}  // namespace k3
