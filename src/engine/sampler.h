// One row of logits and one request's state -> one token. On the host, deterministic, and a pure
// function of (logits, state): order and meaning are vLLM's (docs/engine.md#sampling).
//   logprobs of the untouched row -> min_tokens mask -> logit_bias -> repetition, frequency,
//   presence penalties -> greedy, or temperature -> min_p -> top_k -> top_p -> draw
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "core/status.h"
#include "engine/request.h"

namespace k3 {

// What sampling remembers of one request: its parameters, its seed and, only when a penalty asks
// for it, which tokens it has seen (sparse, so it costs nothing of the vocabulary).
class SamplerState {
 public:
  // `end_ids` and params.stop_token_ids are masked until params.min_tokens tokens are out. `seed`
  // is the request's own or the engine's draw. The parameters must have passed validation.
  SamplerState(const SamplingParams& params, std::span<const int32_t> prompt,
               std::span<const int32_t> end_ids, uint64_t seed);

  // Counts an output token; the next draw uses the next random number.
  void accept(int32_t token);

  const SamplingParams& params() const { return params_; }
  uint64_t seed() const { return seed_; }
  int64_t num_output() const { return num_output_; }
  // Whether the next token needs logits other than the model's own.
  bool edits_logits() const;
  // Applies mask, bias and penalties in place. logits: [vocab_size].
  void edit_logits(std::span<float> logits) const;

 private:
  struct Use {
    bool in_prompt = false;
    int64_t outputs = 0;
  };
  SamplingParams params_;
  uint64_t seed_ = 0;
  int64_t num_output_ = 0;
  bool penalises_ = false;
  std::vector<int32_t> early_masked_;      // until min_tokens
  std::unordered_map<int32_t, Use> seen_;  // filled only when penalises_
};

struct Sample {
  int32_t token = 0;
  TokenLogprob chosen;                // filled when params.logprobs >= 0
  std::span<const TokenLogprob> top;  // params.logprobs most likely, by rank; tokens of probability
                                      // zero are left out; valid until the sampler's next call
};

// Holds scratch for one vocabulary; one per engine. Not thread-safe.
class Sampler {
 public:
  // logits: [vocab_size], untouched. Errors, of this row alone: kInternal when the row holds a NaN
  // or +inf or nothing but -inf (names the first bad token id); kInvalidArgument when the request's
  // own mask and bias leave no token.
  Status sample(std::span<const float> logits, const SamplerState& state, Sample* out);

 private:
  struct Candidate {
    float logit;
    int32_t id;
  };
  struct Weighted {
    double weight;
    Candidate candidate;
  };
  static bool better(const Candidate& a, const Candidate& b) {
    return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
  }

  // Candidates with logit >= floor and > -inf, in id order.
  void gather(std::span<const float> logits, double floor);
  // The k best of those, unsorted, without sorting or copying the vocabulary.
  void select_top(std::span<const float> logits, double floor, int64_t k);
  int32_t draw(std::span<const float> logits, float max, const SamplerState& state);
  // Cuts candidates_ and weights_ (total mass `total`) to the top_p nucleus, in the order they are
  // in.
  void keep_nucleus(double top_p, double total);
  void fill_logprobs(std::span<const float> logits, float max, int32_t n, Sample* out);

  std::vector<float> edited_;
  std::vector<Candidate> candidates_;
  std::vector<double> weights_;  // of candidates_, relative to the best token
  std::vector<Weighted> nucleus_;
  std::vector<TokenLogprob> top_;
};

}  // namespace k3
