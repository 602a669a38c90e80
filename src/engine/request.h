// What a client asks of the engine and what it gets back. No HTTP, no JSON, no text: token ids in,
// token ids out. Text (detokenising, stop strings, channels) is the sink's business.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/status.h"

namespace k3 {

// vLLM bounds it by 0 alone; beyond these a logit times or over it may no longer be finite.
inline constexpr float kMinRepetitionPenalty = 1e-6f, kMaxRepetitionPenalty = 1e6f;

// Names, meanings and defaults are vLLM's.
struct SamplingParams {
  float temperature = 1.0f;                           // 0 = greedy
  int32_t top_k = 0;                                  // 0 or -1 = all
  float top_p = 1.0f;                                 // (0, 1]
  float min_p = 0.0f;                                 // [0, 1]
  float presence_penalty = 0.0f;                      // [-2, 2]
  float frequency_penalty = 0.0f;                     // [-2, 2]
  float repetition_penalty = 1.0f;                    // as above; counts prompt and output tokens
  std::vector<std::pair<int32_t, float>> logit_bias;  // token id -> added to its logit, [-100, 100]
  std::optional<uint64_t> seed;  // same seed, same request, same tokens, whatever the batch
  int64_t max_tokens = 16;
  int64_t min_tokens = 0;  // end ids and stop ids are masked before this many tokens
  bool ignore_eos = false;
  std::vector<int32_t> stop_token_ids;
  int32_t logprobs = -1;  // -1 = none; n = the chosen token and the n most likely
};

enum class FinishReason { kStop, kLength, kCancelled, kError };

struct TokenLogprob {
  int32_t token = 0;
  float logprob =
      0;  // natural log, of the model's own distribution before penalties and temperature
  int32_t rank = 0;  // 1 = most likely
};

struct TokenOutput {
  int32_t token = 0;
  bool is_end = false;  // an end id or stop id: counted in usage, not part of the text. The last
                        // token, unless it is an end id and ignore_eos lets the request go on
  TokenLogprob chosen;  // filled when logprobs >= 0
  std::span<const TokenLogprob> top;  // sorted by rank; valid during the call only
};

struct RequestStats {
  int64_t prompt_tokens = 0;
  int64_t completion_tokens = 0;  // end id included
  double queue_seconds = 0;       // submit -> first scheduled
  double ttft_seconds = 0;        // submit -> first token
  double total_seconds = 0;
};

struct FinishInfo {
  FinishReason reason = FinishReason::kStop;
  int32_t stop_token = -1;  // the end id or stop id that ended it, if one did
  Status error;             // set when reason == kError
  RequestStats stats;
};

// Where a request's output goes. Called on the engine's thread; must not block and must not call
// back into the engine, save Engine::cancel.
class TokenSink {
 public:
  virtual ~TokenSink() = default;
  // Returns false to end the request now with kStop (a stop string matched).
  virtual bool on_token(const TokenOutput& token) = 0;
  // Exactly once, last.
  virtual void on_finish(const FinishInfo& info) = 0;
};

struct Request {
  std::vector<int32_t> prompt;  // at least one token
  SamplingParams sampling;
  std::shared_ptr<TokenSink> sink;
  int rank = -1;  // the rank that must run it (RankRouter); -1: any
};

using RequestId = uint64_t;

}  // namespace k3
