// The request bodies of the API, checked: a field is honoured or refused by name, nothing is
// dropped in silence (docs/serving.md#fields is the table).
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "engine/request.h"
#include "server/api_error.h"
#include "server/generation_defaults.h"
#include "text/chat.h"

namespace k3 {

inline constexpr int64_t kMaxN = 128;        // choices of one prompt
inline constexpr int64_t kMaxLogprobs = 20;  // as vLLM's --max-logprobs
inline constexpr size_t kMaxStopStrings = 16;
inline constexpr size_t kMaxLogitBias = 1024;
inline constexpr size_t kMaxStopTokenIds = 1024;
inline constexpr size_t kMaxChoices = 256;  // prompts * n of one request

// What a body is checked against.
struct SchemaContext {
  int64_t vocab_size = 0;
  GenerationDefaults defaults;
};

// The fields both generation endpoints share.
struct GenerationFields {
  std::string model;
  SamplingParams sampling;            // of choice 0; max_tokens is meaningless while unset below
  std::optional<int64_t> max_tokens;  // >= 1
  int64_t n = 1;
  std::vector<std::string> stop;
  bool include_stop_str_in_output = false;
  bool skip_special_tokens = true;
  bool stream = false;
  bool include_usage = false;
  bool continuous_usage_stats = false;
};

struct CompletionBody {
  GenerationFields common;
  std::vector<std::variant<std::string, std::vector<int32_t>>> prompts;  // at least one, none empty
  bool echo = false;
};

struct ChatBody {
  GenerationFields common;
  ChatRequest chat;
};

struct TokenizeBody {
  std::string model;
  std::variant<std::string, ChatRequest> input;
  bool parse_special = false;  // honour the spelling of special tokens in a prompt
  bool return_token_strs = false;
};

struct DetokenizeBody {
  std::string model;
  std::vector<int32_t> tokens;
};

std::optional<ApiError> parse_completion_body(const nlohmann::ordered_json& body,
                                              const SchemaContext& context, CompletionBody* out);
std::optional<ApiError> parse_chat_body(const nlohmann::ordered_json& body,
                                        const SchemaContext& context, ChatBody* out);
std::optional<ApiError> parse_tokenize_body(const nlohmann::ordered_json& body, TokenizeBody* out);
std::optional<ApiError> parse_detokenize_body(const nlohmann::ordered_json& body,
                                              const SchemaContext& context, DetokenizeBody* out);

// The seed of choice k of a prompt: choice 0 draws what a request of n = 1 with this seed draws.
std::optional<uint64_t> seed_of_choice(const SamplingParams& sampling, int64_t k);

}  // namespace k3
