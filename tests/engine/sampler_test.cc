#include "engine/sampler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>

#include "engine/counter_rng.h"
#include "fake_executor.h"

namespace k3 {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Ways to get it wrong; the comparison below must notice each.
enum class Mutant {
  kNone,
  kBiasAfterPenalties,
  kPresenceCountsPrompt,
  kRepetitionIgnoresPrompt,
  kNoMinTokens,
  kNoMinP,
  kTopPBeforeTopK,
  kTopPKeepsOneLess,
  kTemperatureLast,
};

// Everything sorted, everything in double, nothing clever.
int32_t naive_sample(const std::vector<float>& logits, const SamplingParams& p,
                     const std::vector<int32_t>& prompt, const std::vector<int32_t>& output,
                     const std::vector<int32_t>& end_ids, uint64_t seed,
                     Mutant mutant = Mutant::kNone) {
  std::vector<float> x = logits;
  const auto add_bias = [&] {
    for (const auto& [id, bias] : p.logit_bias) x[static_cast<size_t>(id)] += bias;
  };
  if (mutant != Mutant::kNoMinTokens && static_cast<int64_t>(output.size()) < p.min_tokens) {
    for (int32_t id : end_ids) x[static_cast<size_t>(id)] = -kInf;
    for (int32_t id : p.stop_token_ids) x[static_cast<size_t>(id)] = -kInf;
  }
  if (mutant != Mutant::kBiasAfterPenalties) add_bias();
  for (size_t i = 0; i < x.size(); ++i) {
    const auto id = static_cast<int32_t>(i);
    const bool in_prompt = std::count(prompt.begin(), prompt.end(), id) > 0;
    const auto count = std::count(output.begin(), output.end(), id);
    if (count > 0 || (in_prompt && mutant != Mutant::kRepetitionIgnoresPrompt)) {
      x[i] = x[i] > 0 ? x[i] / p.repetition_penalty : x[i] * p.repetition_penalty;
    }
    x[i] -= p.frequency_penalty * static_cast<float>(count);
    if (count > 0 || (in_prompt && mutant == Mutant::kPresenceCountsPrompt)) {
      x[i] -= p.presence_penalty;
    }
  }
  if (mutant == Mutant::kBiasAfterPenalties) add_bias();

  std::vector<int32_t> order(x.size());  // best first
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return x[static_cast<size_t>(a)] > x[static_cast<size_t>(b)];
  });
  if (p.temperature == 0) return order[0];
  const double max = x[static_cast<size_t>(order[0])];
  const auto weight = [&](int32_t id, double t) {
    return std::exp((static_cast<double>(x[static_cast<size_t>(id)]) - max) / t);
  };
  const double t = p.temperature;
  const double filter_t = mutant == Mutant::kTemperatureLast ? 1.0 : t;

  std::vector<int32_t> kept = order;
  if (mutant != Mutant::kNoMinP) {
    std::erase_if(kept, [&](int32_t id) { return weight(id, filter_t) < p.min_p; });
  }
  const auto top_k = [&] {
    if (p.top_k > 0) kept.resize(std::min(kept.size(), static_cast<size_t>(p.top_k)));
  };
  const auto top_p = [&] {
    if (p.top_p == 1.0f) return;
    double total = 0, before = 0;
    for (int32_t id : kept) total += weight(id, filter_t);
    size_t n = 0;
    while (n < kept.size() && before < static_cast<double>(p.top_p) * total) {
      before += weight(kept[n++], filter_t);
    }
    if (mutant == Mutant::kTopPKeepsOneLess && n > 1) --n;
    kept.resize(n);
  };
  if (mutant == Mutant::kTopPBeforeTopK) {
    top_p();
    top_k();
  } else {
    top_k();
    top_p();
  }
  std::sort(kept.begin(), kept.end());
  double total = 0, below = 0;
  for (int32_t id : kept) total += weight(id, t);
  const double target = counter_uniform(seed, output.size()) * total;
  for (int32_t id : kept) {
    below += weight(id, t);
    if (below > target) return id;
  }
  return kept.back();
}

// A stream of test choices.
struct Dice {
  uint64_t state;
  uint64_t bits() { return state = mix(state); }
  int64_t below(int64_t n) { return static_cast<int64_t>(bits() % static_cast<uint64_t>(n)); }
  float uniform() { return static_cast<float>(bits() >> 40) * 0x1p-24f; }
  bool chance(double p) { return uniform() < p; }
};

struct Trial {
  std::vector<float> logits;
  SamplingParams params;
  std::vector<int32_t> prompt, output, end_ids;
  uint64_t seed = 0;
};

Trial make_trial(uint64_t number, int64_t max_vocab) {
  Dice dice{number};
  Trial t;
  const int64_t vocab = 4 + dice.below(max_vocab - 3);
  const bool ties = dice.chance(0.3);
  const float scale = 1.0f + 12.0f * dice.uniform();
  for (int64_t i = 0; i < vocab; ++i) {
    float x = (dice.uniform() + dice.uniform() - 1.0f) * scale;
    if (ties) x = std::round(x);
    t.logits.push_back(i > 2 && dice.chance(0.02) ? -kInf : x);
  }
  const auto some = [&](int64_t n) {
    std::vector<int32_t> ids;
    for (int64_t i = 0; i < n; ++i) ids.push_back(static_cast<int32_t>(dice.below(vocab)));
    return ids;
  };
  t.prompt = some(1 + dice.below(vocab / 2 + 1));
  t.output = some(dice.below(vocab / 2 + 1));
  t.end_ids = {static_cast<int32_t>(vocab - 1)};
  t.seed = dice.bits();
  SamplingParams& p = t.params;
  p.temperature = dice.chance(0.1) ? 0.0f : 0.1f + 2.0f * dice.uniform();
  if (dice.chance(0.5)) p.top_k = static_cast<int32_t>(1 + dice.below(vocab));
  if (dice.chance(0.1)) p.top_k = -1;
  if (dice.chance(0.5)) p.top_p = 0.05f + 0.9f * dice.uniform();
  if (dice.chance(0.3)) p.min_p = 0.3f * dice.uniform();
  if (dice.chance(0.3)) p.repetition_penalty = 0.6f + dice.uniform();
  if (dice.chance(0.3)) p.presence_penalty = 4 * dice.uniform() - 2;
  if (dice.chance(0.3)) p.frequency_penalty = 4 * dice.uniform() - 2;
  if (dice.chance(0.3)) {
    for (int i = 0; i < 5; ++i) {
      p.logit_bias.emplace_back(static_cast<int32_t>(dice.below(vocab)),
                                dice.chance(0.2) ? -100.0f : 8 * dice.uniform() - 4);
    }
  }
  if (dice.chance(0.3)) p.min_tokens = dice.below(vocab);
  if (dice.chance(0.3)) p.stop_token_ids = {2, 1};
  return t;
}

SamplerState state_of(const Trial& t) {
  SamplerState state(t.params, t.prompt, t.end_ids, t.seed);
  for (int32_t token : t.output) state.accept(token);
  return state;
}

int32_t naive_sample(const Trial& t, Mutant mutant = Mutant::kNone) {
  return naive_sample(t.logits, t.params, t.prompt, t.output, t.end_ids, t.seed, mutant);
}

TEST(CounterRng, PhiloxGivesThePublishedVectors) {
  EXPECT_EQ(philox4x32({0, 0, 0, 0}, {0, 0}),
            (PhiloxBlock{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox4x32({~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}),
            (PhiloxBlock{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (PhiloxBlock{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(CounterRng, UniformStaysBelowOne) {
  for (uint64_t i = 0; i < 100000; ++i) {
    const double u = counter_uniform(42, i);
    ASSERT_GE(u, 0.0);
    ASSERT_LT(u, 1.0);
  }
}

TEST(Sampler, EqualsTheNaiveSamplerForEveryMixOfParameters) {
  Sampler sampler;
  for (uint64_t i = 0; i < 4000; ++i) {
    const Trial t = make_trial(i, i % 10 == 0 ? 3000 : 60);
    Sample sample;
    ASSERT_TRUE(sampler.sample(t.logits, state_of(t), &sample).ok()) << i;
    ASSERT_EQ(sample.token, naive_sample(t)) << "trial " << i;
  }
}

TEST(Sampler, TheComparisonWithTheNaiveSamplerNoticesEveryMutant) {
  Sampler sampler;
  for (Mutant mutant :
       {Mutant::kBiasAfterPenalties, Mutant::kPresenceCountsPrompt,
        Mutant::kRepetitionIgnoresPrompt, Mutant::kNoMinTokens, Mutant::kNoMinP,
        Mutant::kTopPBeforeTopK, Mutant::kTopPKeepsOneLess, Mutant::kTemperatureLast}) {
    int differences = 0;
    for (uint64_t i = 0; i < 4000; ++i) {
      const Trial t = make_trial(i, 60);
      Sample sample;
      ASSERT_TRUE(sampler.sample(t.logits, state_of(t), &sample).ok());
      differences += sample.token != naive_sample(t, mutant) ? 1 : 0;
    }
    EXPECT_GT(differences, 0) << "mutant " << static_cast<int>(mutant);
  }
}

TEST(Sampler, EqualsTheNaiveSamplerOnTheFullVocabulary) {
  std::vector<float> logits(163840);
  Dice dice{7};
  for (float& x : logits) x = 6 * (dice.uniform() + dice.uniform() + dice.uniform());
  Sampler sampler;
  for (const auto& [top_k, top_p, min_p] :
       std::vector<std::tuple<int, float, float>>{{0, 1.0f, 0.0f},
                                                  {50, 1.0f, 0.0f},
                                                  {0, 0.95f, 0.0f},
                                                  {40000, 0.9f, 0.0f},
                                                  {0, 0.9f, 0.05f},
                                                  {163840, 0.5f, 0.0f}}) {
    Trial t;
    t.logits = logits;
    t.prompt = {0};
    t.params.top_k = top_k;
    t.params.top_p = top_p;
    t.params.min_p = min_p;
    for (t.seed = 0; t.seed < 3; ++t.seed) {
      Sample sample;
      ASSERT_TRUE(sampler.sample(t.logits, state_of(t), &sample).ok());
      EXPECT_EQ(sample.token, naive_sample(t)) << top_k << " " << top_p << " " << min_p;
    }
  }
}

double chi_square(const std::vector<float>& logits, double temperature,
                  const std::map<int32_t, int>& counts, int draws) {
  double total = 0, chi = 0;
  for (float x : logits) total += std::exp(x / temperature);
  for (size_t i = 0; i < logits.size(); ++i) {
    const double expected = draws * std::exp(logits[i] / temperature) / total;
    const auto it = counts.find(static_cast<int32_t>(i));
    const double found = it == counts.end() ? 0 : it->second;
    chi += (found - expected) * (found - expected) / expected;
  }
  return chi;
}

TEST(Sampler, DrawsFollowTheDistribution) {
  std::vector<float> logits;
  for (int i = 0; i < 16; ++i) logits.push_back(0.15f * static_cast<float>((i * 7) % 16));
  SamplingParams params;
  params.temperature = 0.8f;
  SamplerState state(params, {}, {}, 1234);
  Sampler sampler;
  std::map<int32_t, int> counts;
  constexpr int kDraws = 40000;
  for (int i = 0; i < kDraws; ++i) {
    Sample sample;
    ASSERT_TRUE(sampler.sample(logits, state, &sample).ok());
    state.accept(sample.token);
    ++counts[sample.token];
  }
  constexpr double kLimit = 37.7;  // 15 degrees of freedom, 0.999
  EXPECT_LT(chi_square(logits, params.temperature, counts, kDraws), kLimit);
  // The same draws do not pass for a neighbouring temperature.
  EXPECT_GT(chi_square(logits, 0.9, counts, kDraws), kLimit);
}

TEST(Sampler, GreedyTakesTheLowestIdOnTiesAndIgnoresTheSeed) {
  std::vector<float> logits(37, -1.0f);
  logits[11] = logits[12] = logits[36] = 2.5f;
  SamplingParams params;
  params.temperature = 0;
  Sampler sampler;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    Sample sample;
    ASSERT_TRUE(sampler.sample(logits, SamplerState(params, {}, {}, seed), &sample).ok());
    EXPECT_EQ(sample.token, 11);
    // Top 1 is greedy, ties included.
    SamplingParams top1;
    top1.top_k = 1;
    ASSERT_TRUE(sampler.sample(logits, SamplerState(top1, {}, {}, seed), &sample).ok());
    EXPECT_EQ(sample.token, 11);
  }
}

TEST(Sampler, ADrawDependsOnSeedAndTokenIndexAlone) {
  std::vector<float> logits(64, 0.0f);
  SamplingParams params;
  Sampler one, other;
  SamplerState a(params, {}, {}, 99), b(params, {}, {}, 99), c(params, {}, {}, 100);
  std::vector<int32_t> from_a, from_b, from_c;
  Sample sample;
  for (int i = 0; i < 50; ++i) {
    ASSERT_TRUE(one.sample(logits, a, &sample).ok());
    a.accept(sample.token);
    from_a.push_back(sample.token);
  }
  for (int i = 0; i < 50; ++i) {
    ASSERT_TRUE(other.sample(logits, c, &sample).ok());  // work in between
    c.accept(sample.token);
    from_c.push_back(sample.token);
    ASSERT_TRUE(other.sample(logits, b, &sample).ok());
    b.accept(sample.token);
    from_b.push_back(sample.token);
  }
  EXPECT_EQ(from_a, from_b);
  EXPECT_NE(from_a, from_c);
}

TEST(Sampler, LogprobsAreTheRoundedDoublesOfTheUntouchedRow) {
  Sampler sampler;
  for (uint64_t i = 0; i < 300; ++i) {
    Trial t = make_trial(i, 200);
    t.params.logprobs = static_cast<int32_t>(i % 8);
    Sample sample;
    ASSERT_TRUE(sampler.sample(t.logits, state_of(t), &sample).ok());

    const double max = *std::max_element(t.logits.begin(), t.logits.end());
    double sum = 0;
    for (float x : t.logits) sum += std::exp(static_cast<double>(x) - max);
    std::vector<int32_t> order(t.logits.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
      return t.logits[static_cast<size_t>(a)] > t.logits[static_cast<size_t>(b)];
    });
    const auto logprob = [&](int32_t id) {
      const double x = t.logits[static_cast<size_t>(id)];
      return static_cast<float>(x - max - std::log(sum));
    };
    EXPECT_EQ(sample.chosen.token, sample.token);
    EXPECT_EQ(sample.chosen.logprob, logprob(sample.token));
    EXPECT_EQ(order[static_cast<size_t>(sample.chosen.rank - 1)], sample.token);
    std::erase_if(order, [&](int32_t id) { return t.logits[static_cast<size_t>(id)] == -kInf; });
    ASSERT_EQ(sample.top.size(), std::min(order.size(), static_cast<size_t>(t.params.logprobs)));
    for (size_t j = 0; j < sample.top.size(); ++j) {
      EXPECT_EQ(sample.top[j].token, order[j]);
      EXPECT_EQ(sample.top[j].rank, static_cast<int32_t>(j) + 1);
      EXPECT_EQ(sample.top[j].logprob, logprob(order[j]));
    }
  }
}

TEST(Sampler, RefusesARowWithANonFiniteValueAnywhere) {
  Sampler sampler;
  const SamplerState state(SamplingParams{}, {}, {}, 0);
  Sample sample;
  for (size_t vocab : {1, 7, 8, 9, 100}) {
    for (size_t at = 0; at < vocab; ++at) {
      for (float bad : {kNan, -kNan, kInf}) {
        std::vector<float> logits(vocab, 1.0f);
        logits[at] = bad;
        const Status status = sampler.sample(logits, state, &sample);
        ASSERT_EQ(status.code(), ErrorCode::kInternal) << vocab << " " << at << " " << bad;
        EXPECT_THAT(status.message(), testing::EndsWith(cat("at token id ", at)));
      }
    }
    const Status status = sampler.sample(std::vector<float>(vocab, -kInf), state, &sample);
    EXPECT_EQ(status.code(), ErrorCode::kInternal);
    EXPECT_THAT(status.message(), testing::HasSubstr("-inf"));
    // One finite value among -inf is a distribution.
    std::vector<float> one(vocab, -kInf);
    one[vocab - 1] = -3.0f;
    ASSERT_TRUE(sampler.sample(one, state, &sample).ok());
    EXPECT_EQ(sample.token, static_cast<int32_t>(vocab - 1));
  }
}

TEST(Sampler, MinTokensThatMasksEverythingIsTheRequestsFault) {
  Trial t;
  t.logits = {1.0f, -kInf};
  t.params.min_tokens = 1;
  t.end_ids = {0};
  Sampler sampler;
  Sample sample;
  EXPECT_EQ(sampler.sample(t.logits, state_of(t), &sample).code(), ErrorCode::kInvalidArgument);
  t.output = {0};  // past min_tokens
  EXPECT_TRUE(sampler.sample(t.logits, state_of(t), &sample).ok());
}

TEST(Sampler, ExtremeParametersStillChooseAToken) {
  Sampler sampler;
  for (float temperature : {1e-38f, 1e-6f, 3e38f}) {
    for (float repetition : {std::numeric_limits<float>::min(), 3e38f}) {
      for (float top_p : {1e-38f, 0.999999f}) {
        Trial t;
        t.logits = {3.0f, -2.0f, 3e38f, 0.0f};
        t.prompt = {0, 1, 2, 3};
        t.params.temperature = temperature;
        t.params.repetition_penalty = repetition;
        t.params.top_p = top_p;
        Sample sample;
        ASSERT_TRUE(sampler.sample(t.logits, state_of(t), &sample).ok());
        EXPECT_GE(sample.token, 0);
        EXPECT_LT(sample.token, 4);
      }
    }
  }
}

}  // namespace
}  // namespace k3
