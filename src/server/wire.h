// The JSON of answers and the frames of a stream. Absent keys rather than nulls in deltas.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "server/api_error.h"
#include "server/choice_pipeline.h"

namespace k3 {

struct AnswerMeta {
  std::string id;  // chatcmpl-... or cmpl-...
  std::string model;
  int64_t created = 0;  // Unix seconds
  bool chat = false;
};

struct Usage {
  int64_t prompt_tokens = 0;
  int64_t completion_tokens = 0;  // end ids included
};

// Why a choice ended, as the client sees it.
struct Ending {
  std::string finish_reason;
  // What stopped it, vLLM's `stop_reason`: the stop string, or the stop id the client named.
  std::variant<std::monostate, std::string, int32_t> stop_reason;
};

// A choice added up.
struct ChoiceResult {
  struct ToolCall {
    std::string id, name, arguments;
  };
  std::string reasoning, content;
  std::vector<ToolCall> tool_calls;
  std::vector<LogprobEntry> logprobs;
  Ending ending;

  void add(const Delta& delta);
};

// "prefix-" and 24 random hex digits.
std::string random_id(const std::string& prefix);

// A token's text for logprobs: its own where that is UTF-8, else `bytes:\xf0\x9f` (as OpenAI does).
std::string token_text(const Tokenizer& tokenizer, int32_t id);

// One `data: ...\n\n` frame of a choice. `delta` null and `first` false: only an ending and
// logprobs. `logprobs` null when the client did not ask.
struct FrameParts {
  int64_t index = 0;
  bool role = false;  // chat: the first frame
  const Delta* delta = nullptr;
  const std::vector<LogprobEntry>* logprobs = nullptr;
  const Ending* ending = nullptr;
  const Usage* usage = nullptr;  // continuous_usage_stats
};
std::string choice_frame(const AnswerMeta& meta, const Tokenizer& tokenizer,
                         const FrameParts& parts);
std::string text_frame(const AnswerMeta& meta, int64_t index, const std::string& text);  // echo
std::string usage_frame(const AnswerMeta& meta, const Usage& usage);
std::string error_frame(const ApiError& error);
inline constexpr const char* kDoneFrame = "data: [DONE]\n\n";

// The whole answer of a non-streaming request.
std::string answer_body(const AnswerMeta& meta, const Tokenizer& tokenizer, bool logprobs,
                        const std::vector<ChoiceResult>& choices, const Usage& usage);

std::string dump_json(const nlohmann::ordered_json& value);  // one line; never throws on bad UTF-8

}  // namespace k3
