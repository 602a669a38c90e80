// What the engine knows of a request between submit and finish.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "engine/request.h"
#include "engine/sampler.h"

namespace k3 {

enum class Phase {
  kWaiting,  // queued: no slot, no pages
  kPrefill,  // admitted: prompt tokens [0, num_computed) are in the executor
  kDecode,   // the prompt and all output tokens but the last are in the executor
};

struct RequestState {
  RequestState(RequestId request_id, Request r, SamplerState s, double now)
      : id(request_id), request(std::move(r)), sampler(std::move(s)), submitted_at(now) {}

  RequestId id;
  Request request;
  SamplerState sampler;

  Phase phase = Phase::kWaiting;
  bool cancelled = false;  // asked for while the engine was in the middle of a step

  int32_t slot = -1;
  std::vector<int32_t> pages;  // block table for prompt + max_tokens, taken at admission
  int64_t num_computed = 0;    // tokens the executor holds; the next segment's position
  int64_t num_granted = 0;     // prefill rows dealt in the step being planned

  int64_t num_generated = 0;
  int32_t last_token = -1;  // generated, not yet fed back

  double submitted_at;
  double scheduled_at = -1;    // first segment; -1 = never
  double first_token_at = -1;  // -1 = none yet

  int64_t prompt_size() const { return static_cast<int64_t>(request.prompt.size()); }
  // Most tokens this request can ever hold.
  int64_t max_total_tokens() const { return prompt_size() + request.sampling.max_tokens; }
};

}  // namespace k3
