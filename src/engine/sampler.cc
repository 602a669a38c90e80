#include "engine/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "engine/counter_rng.h"
#include "engine/exp.h"

namespace k3 {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// A token e^-50 times as likely as the best one is never drawn: all such tokens of any vocabulary
// together weigh less than one step of the 53-bit uniform.
constexpr double kNegligible = -50.0;

struct RowScan {
  float max = -kInf;
  bool bad = false;  // a NaN or a +inf
};

// One pass; eight independent lanes so that the compiler may use vector registers although a float
// maximum is not associative in its eyes.
RowScan scan_row(std::span<const float> row) {
  constexpr size_t kLanes = 8;
  float max[kLanes];
  std::fill(max, max + kLanes, -kInf);
  int bad[kLanes] = {};
  size_t i = 0;
  for (; i + kLanes <= row.size(); i += kLanes) {
    for (size_t j = 0; j < kLanes; ++j) {
      const float x = row[i + j];
      bad[j] |= static_cast<int>(!(x < kInf));
      max[j] = x > max[j] ? x : max[j];
    }
  }
  RowScan scan;
  for (; i < row.size(); ++i) {
    scan.bad |= !(row[i] < kInf);
    scan.max = row[i] > scan.max ? row[i] : scan.max;
  }
  for (size_t j = 0; j < kLanes; ++j) {
    scan.bad |= bad[j] != 0;
    scan.max = max[j] > scan.max ? max[j] : scan.max;
  }
  return scan;
}

Status bad_row(std::span<const float> row) {
  int64_t count = 0, first = -1;
  for (size_t i = 0; i < row.size(); ++i) {
    if (row[i] < kInf) continue;
    if (first < 0) first = static_cast<int64_t>(i);
    ++count;
  }
  if (count == 0) {
    return {ErrorCode::kInternal, cat("logits: all ", row.size(), " values are -inf")};
  }
  return {
      ErrorCode::kInternal,
      cat("logits: ", count, " of ", row.size(), " values are not finite, the first is ",
          std::isnan(row[static_cast<size_t>(first)]) ? "NaN" : "+inf", " at token id ", first)};
}

// Lowest id among equals.
int32_t first_equal(std::span<const float> row, float value) {
  return static_cast<int32_t>(std::find(row.begin(), row.end(), value) - row.begin());
}

}  // namespace

SamplerState::SamplerState(const SamplingParams& params, std::span<const int32_t> prompt,
                           std::span<const int32_t> end_ids, uint64_t seed)
    : params_(params), seed_(seed) {
  penalises_ = params.repetition_penalty != 1.0f || params.presence_penalty != 0.0f ||
               params.frequency_penalty != 0.0f;
  if (params.repetition_penalty != 1.0f) {
    for (int32_t token : prompt) seen_[token].in_prompt = true;
  }
  if (params.min_tokens > 0) {
    early_masked_.assign(end_ids.begin(), end_ids.end());
    early_masked_.insert(early_masked_.end(), params.stop_token_ids.begin(),
                         params.stop_token_ids.end());
  }
}

void SamplerState::accept(int32_t token) {
  ++num_output_;
  if (penalises_) ++seen_[token].outputs;
}

bool SamplerState::edits_logits() const {
  return !params_.logit_bias.empty() || !seen_.empty() ||
         (num_output_ < params_.min_tokens && !early_masked_.empty());
}

void SamplerState::edit_logits(std::span<float> logits) const {
  if (num_output_ < params_.min_tokens) {
    for (int32_t id : early_masked_) logits[static_cast<size_t>(id)] = -kInf;
  }
  for (const auto& [id, bias] : params_.logit_bias) logits[static_cast<size_t>(id)] += bias;
  for (const auto& [id, use] : seen_) {
    float& x = logits[static_cast<size_t>(id)];
    // seen_ holds prompt tokens only when repetition_penalty is in use.
    x = x > 0 ? x / params_.repetition_penalty : x * params_.repetition_penalty;
    if (use.outputs > 0) {
      x -= params_.frequency_penalty * static_cast<float>(use.outputs);
      x -= params_.presence_penalty;
    }
    // A penalty near zero may overflow; the token is then the best, not an infinity.
    x = std::min(x, std::numeric_limits<float>::max());
  }
}

void Sampler::gather(std::span<const float> logits, double floor) {
  candidates_.clear();
  for (size_t i = 0; i < logits.size(); ++i) {
    if (logits[i] >= floor && logits[i] > -kInf) {
      candidates_.push_back({logits[i], static_cast<int32_t>(i)});
    }
  }
}

void Sampler::select_top(std::span<const float> logits, double floor, int64_t k) {
  candidates_.clear();
  if (k <= 0) return;
  const size_t keep = static_cast<size_t>(k);
  const size_t capacity = std::max<size_t>(2 * keep, 1024);
  // Ids ascend, so a later token must be strictly greater than the k-th best so far to displace it.
  float threshold = -kInf;
  for (size_t i = 0; i < logits.size(); ++i) {
    if (!(logits[i] > threshold) || logits[i] < floor) continue;
    candidates_.push_back({logits[i], static_cast<int32_t>(i)});
    if (candidates_.size() == capacity) {
      std::nth_element(candidates_.begin(), candidates_.begin() + static_cast<int64_t>(keep) - 1,
                       candidates_.end(), better);
      candidates_.resize(keep);
      threshold = candidates_.back().logit;
    }
  }
  if (candidates_.size() > keep) {
    std::nth_element(candidates_.begin(), candidates_.begin() + static_cast<int64_t>(keep) - 1,
                     candidates_.end(), better);
    candidates_.resize(keep);
  }
}

void Sampler::keep_nucleus(double top_p, double total) {
  // Kept, best first, are the tokens whose betters weigh less than `target` together.
  const double target = top_p * total;
  // Tokens this light weigh less than (1 - p) in all, so none of them can be kept; dropping them
  // first leaves a handful on a peaked distribution. Halved against rounding.
  const double light = 0.5 * (total - target) / static_cast<double>(candidates_.size());
  nucleus_.clear();
  for (size_t i = 0; i < candidates_.size(); ++i) {
    if (weights_[i] > light) nucleus_.push_back({weights_[i], candidates_[i]});
  }
  const auto heavier = [](const Weighted& a, const Weighted& b) {
    return better(a.candidate, b.candidate);
  };
  // Quickselect by mass: [0, lo) is kept, [hi, end) is dropped, `above` is the mass of [0, lo).
  auto lo = nucleus_.begin(), hi = nucleus_.end();
  double above = 0;
  while (hi - lo > 16) {
    const auto mid = lo + (hi - lo) / 2;
    std::nth_element(lo, mid, hi, heavier);
    double mass = 0;
    for (auto it = lo; it != mid; ++it) mass += it->weight;
    if (above + mass >= target) {
      hi = mid;
    } else {
      above += mass;
      lo = mid;
    }
  }
  std::sort(lo, hi, heavier);
  Candidate last = lo->candidate;
  for (; lo != hi && above < target; ++lo) {
    last = lo->candidate;
    above += lo->weight;
  }
  size_t kept = 0;
  for (size_t i = 0; i < candidates_.size(); ++i) {
    if (better(last, candidates_[i])) continue;
    candidates_[kept] = candidates_[i];
    weights_[kept++] = weights_[i];
  }
  candidates_.resize(kept);
  weights_.resize(kept);
}

int32_t Sampler::draw(std::span<const float> logits, float max, const SamplerState& state) {
  const SamplingParams& params = state.params();
  const double temperature = params.temperature;
  double lowest = kNegligible;  // of (logit - max) / temperature
  if (params.min_p > 0) lowest = std::max(lowest, std::log(static_cast<double>(params.min_p)));
  const double floor = static_cast<double>(max) + lowest * temperature;

  if (params.top_k > 0 && static_cast<size_t>(params.top_k) < logits.size()) {
    select_top(logits, floor, params.top_k);
    std::sort(candidates_.begin(), candidates_.end(),
              [](const Candidate& a, const Candidate& b) { return a.id < b.id; });
  } else {
    gather(logits, floor);
  }

  weights_.resize(candidates_.size());
  for (size_t i = 0; i < candidates_.size(); ++i) {  // kNegligible or more
    weights_[i] =
        (static_cast<double>(candidates_[i].logit) - static_cast<double>(max)) / temperature;
  }
  for (double& w : weights_) w = exp_nonpositive(w);
  double total = 0;
  for (double weight : weights_) total += weight;
  if (params.top_p < 1.0f) {
    keep_nucleus(params.top_p, total);
    total = 0;
    for (double weight : weights_) total += weight;
  }

  // Inverse of the distribution function in id order.
  const double target =
      counter_uniform(state.seed(), static_cast<uint64_t>(state.num_output())) * total;
  double below = 0;
  for (size_t i = 0; i < weights_.size(); ++i) {
    below += weights_[i];
    if (below > target) return candidates_[i].id;
  }
  return candidates_.back().id;  // u * total rounded up to total
}

void Sampler::fill_logprobs(std::span<const float> logits, float max, int32_t n, Sample* out) {
  const double top = max;
  weights_.resize(logits.size());
  for (size_t i = 0; i < logits.size(); ++i) {
    weights_[i] = std::max(static_cast<double>(logits[i]) - top, kExpFloor);
  }
  for (double& w : weights_) w = exp_nonpositive(w);
  double sum = 0;
  for (double weight : weights_) sum += weight;
  const double log_sum = std::log(sum);
  const auto logprob = [&](float x) {
    return static_cast<float>(static_cast<double>(x) - top - log_sum);
  };

  const float chosen = logits[static_cast<size_t>(out->token)];
  // Equal tokens before it in id order rank before it.
  const size_t at = static_cast<size_t>(out->token);
  int32_t rank = 1;
  for (size_t i = 0; i < at; ++i) rank += logits[i] >= chosen ? 1 : 0;
  for (size_t i = at + 1; i < logits.size(); ++i) rank += logits[i] > chosen ? 1 : 0;
  out->chosen = {out->token, logprob(chosen), rank};

  select_top(logits, -kInf, n);
  std::sort(candidates_.begin(), candidates_.end(), better);
  top_.clear();
  for (const Candidate& c : candidates_) {
    top_.push_back({c.id, logprob(c.logit), static_cast<int32_t>(top_.size()) + 1});
  }
  out->top = top_;
}

Status Sampler::sample(std::span<const float> logits, const SamplerState& state, Sample* out) {
  const RowScan raw = scan_row(logits);
  if (raw.bad || raw.max == -kInf) return bad_row(logits);

  std::span<const float> row = logits;
  float max = raw.max;
  if (state.edits_logits()) {
    edited_.assign(logits.begin(), logits.end());
    state.edit_logits(edited_);
    row = edited_;
    max = scan_row(row).max;
    if (max == -kInf) {
      return invalid_argument(
          "no token left to sample: min_tokens masks every token that has a "
          "probability (output token ",
          state.num_output(), ")");
    }
  }

  *out = {};
  out->token = state.params().temperature == 0.0f ? first_equal(row, max) : draw(row, max, state);
  if (state.params().logprobs >= 0) fill_logprobs(logits, raw.max, state.params().logprobs, out);
  return {};
}

}  // namespace k3
