#include "engine/validate.h"

#include "engine/page_pool.h"

namespace k3 {
namespace {

// lo <= value <= hi; false for NaN.
Status check_range(const char* field, float value, float lo, float hi) {
  if (value >= lo && value <= hi) return {};
  return invalid_argument(field, ": ", value, ", expected ", lo, " to ", hi);
}

Status check_token(const char* field, int64_t id, int64_t vocab_size) {
  if (id >= 0 && id < vocab_size) return {};
  return invalid_argument(field, ": token id ", id, ", expected 0 to ", vocab_size - 1);
}

Status check_lengths(const Request& request, const EngineOptions& options,
                     const ExecutorLimits& limits) {
  const int64_t prompt = static_cast<int64_t>(request.prompt.size());
  const int64_t max_tokens = request.sampling.max_tokens;
  const int64_t min_tokens = request.sampling.min_tokens;
  if (prompt == 0) return invalid_argument("prompt: empty, expected at least 1 token");
  if (max_tokens < 1) return invalid_argument("max_tokens: ", max_tokens, ", expected at least 1");
  // Subtract, never add: max_tokens may be INT64_MAX.
  if (prompt > options.max_model_len || max_tokens > options.max_model_len - prompt) {
    return invalid_argument("max_tokens: prompt of ", prompt, " tokens + max_tokens ", max_tokens,
                            " exceeds max_model_len ", options.max_model_len);
  }
  if (const int64_t need = pages_for(prompt + max_tokens); need > limits.num_pages) {
    return invalid_argument("max_tokens: prompt of ", prompt, " tokens + max_tokens ", max_tokens,
                            " needs ", need, " KV pages of ", kPageTokens, " tokens, the pool has ",
                            limits.num_pages);
  }
  if (min_tokens < 0 || min_tokens > max_tokens) {
    return invalid_argument("min_tokens: ", min_tokens, ", expected 0 to max_tokens ", max_tokens);
  }
  return {};
}

Status check_sampling(const SamplingParams& s, const EngineOptions& options, int64_t vocab_size) {
  constexpr float kMax = std::numeric_limits<float>::max();
  K3_RETURN_IF_ERROR(check_range("temperature", s.temperature, 0.0f, kMax));
  K3_RETURN_IF_ERROR(check_range("min_p", s.min_p, 0.0f, 1.0f));
  K3_RETURN_IF_ERROR(check_range("presence_penalty", s.presence_penalty, -2.0f, 2.0f));
  K3_RETURN_IF_ERROR(check_range("frequency_penalty", s.frequency_penalty, -2.0f, 2.0f));
  K3_RETURN_IF_ERROR(check_range("repetition_penalty", s.repetition_penalty, kMinRepetitionPenalty,
                                 kMaxRepetitionPenalty));
  if (!(s.top_p > 0.0f && s.top_p <= 1.0f)) {
    return invalid_argument("top_p: ", s.top_p, ", expected above 0 and at most 1");
  }
  if (s.top_k < -1) {
    return invalid_argument("top_k: ", s.top_k, ", expected -1 or 0 (all tokens) or at least 1");
  }
  for (const auto& [id, bias] : s.logit_bias) {
    K3_RETURN_IF_ERROR(check_token("logit_bias", id, vocab_size));
    K3_RETURN_IF_ERROR(check_range("logit_bias", bias, -100.0f, 100.0f));
  }
  for (int32_t id : s.stop_token_ids) {
    K3_RETURN_IF_ERROR(check_token("stop_token_ids", id, vocab_size));
  }
  if (s.logprobs < -1 || s.logprobs > options.max_logprobs) {
    return invalid_argument("logprobs: ", s.logprobs, ", expected -1 (none) to ",
                            options.max_logprobs);
  }
  return {};
}

}  // namespace

Status validate_request(const Request& request, const EngineOptions& options,
                        const ExecutorLimits& limits) {
  K3_RETURN_IF_ERROR(check_lengths(request, options, limits));
  for (int32_t id : request.prompt) {
    K3_RETURN_IF_ERROR(check_token("prompt", id, limits.vocab_size));
  }
  return check_sampling(request.sampling, options, limits.vocab_size);
}

}  // namespace k3
