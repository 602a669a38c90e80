// Sampling flags shared by generate and chat; names and meanings are vLLM's.
#pragma once

#include <string>
#include <vector>

#include "cli/args.h"
#include "engine/request.h"

namespace k3::cli {

struct SamplingArgs {
  float temperature = 1.0f;
  int32_t top_k = 0;
  float top_p = 1.0f;
  float min_p = 0.0f;
  float presence_penalty = 0.0f;
  float frequency_penalty = 0.0f;
  float repetition_penalty = 1.0f;
  int64_t seed = -1;
  int64_t min_tokens = 0;
  bool ignore_eos = false;
  std::vector<int32_t> stop_token_ids;
  std::vector<std::string> stop;

  SamplingParams params(int64_t max_tokens) const {
    SamplingParams p;
    p.temperature = temperature;
    p.top_k = top_k;
    p.top_p = top_p;
    p.min_p = min_p;
    p.presence_penalty = presence_penalty;
    p.frequency_penalty = frequency_penalty;
    p.repetition_penalty = repetition_penalty;
    if (seed >= 0) p.seed = static_cast<uint64_t>(seed);
    p.max_tokens = max_tokens;
    p.min_tokens = min_tokens;
    p.ignore_eos = ignore_eos;
    p.stop_token_ids = stop_token_ids;
    return p;
  }
};

inline void add_sampling_flags(CLI::App* app, SamplingArgs* a) {
  add_flag_with_value(app, "--temperature", a->temperature, "0 picks the most likely token");
  add_flag_with_value(app, "--top-k", a->top_k, "Keep the k most likely tokens (0: all)");
  add_flag_with_value(app, "--top-p", a->top_p, "Keep the smallest set with this probability");
  add_flag_with_value(app, "--min-p", a->min_p, "Drop tokens below this part of the most likely");
  add_flag_with_value(app, "--presence-penalty", a->presence_penalty, "[-2, 2]");
  add_flag_with_value(app, "--frequency-penalty", a->frequency_penalty, "[-2, 2]");
  add_flag_with_value(app, "--repetition-penalty", a->repetition_penalty, "> 0; 1: none");
  add_flag_with_value(app, "--seed", a->seed, "Same seed, same tokens (-1: a new one each time)");
  add_flag_with_value(app, "--min-tokens", a->min_tokens, "No end before this many tokens");
  add_switch(app, "--ignore-eos", a->ignore_eos, "Go on past end ids, to --max-tokens");
  add_flag_with_value(app, "--stop-token-ids", a->stop_token_ids, "Further ids that end the output")
      ->delimiter(',');
  add_flag_with_value(app, "--stop", a->stop, "Strings that end the output (repeatable)");
}

// Strings no user means.
inline Status check_stop_strings(const std::vector<std::string>& stop) {
  for (const std::string& s : stop) {
    if (s.empty()) return invalid_argument("--stop: an empty string would end every output");
  }
  return {};
}

}  // namespace k3::cli
