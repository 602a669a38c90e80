// k3-nano and the two tiny checkpoints against values from implementations that share no code with
// this one. The bounds are those of tests/data/*/README.md, to the letter.
#include <cmath>
#include <nlohmann/json.hpp>

#include "gates/model_fixture.h"

namespace k3::gates {
namespace {

struct Distance {
  double max_abs = 0;
  double median_relative_rms = 0;
  int64_t argmax_equal = 0, rows = 0;
  double max_kl = 0;  // KL(reference || ours)
  std::vector<bool> same_argmax;
};

Distance compare(const std::vector<float>& got, const std::vector<float>& want, int64_t vocab) {
  Distance d;
  EXPECT_EQ(got.size(), want.size());
  if (got.size() != want.size()) {
    d.max_abs = INFINITY;
    return d;
  }
  std::vector<double> rms;
  d.rows = static_cast<int64_t>(want.size()) / vocab;
  for (int64_t r = 0; r < d.rows; ++r) {
    const float* a = got.data() + r * vocab;
    const float* b = want.data() + r * vocab;
    double err = 0, ref = 0, za = 0, zb = 0, kl = 0;
    const double ta = *std::max_element(a, a + vocab), tb = *std::max_element(b, b + vocab);
    for (int64_t i = 0; i < vocab; ++i) {
      const double diff = std::fabs(static_cast<double>(a[i]) - b[i]);
      if (!(diff <= d.max_abs)) d.max_abs = std::isnan(diff) ? INFINITY : diff;
      err += diff * diff;
      ref += static_cast<double>(b[i]) * b[i];
      za += std::exp(a[i] - ta);
      zb += std::exp(b[i] - tb);
    }
    for (int64_t i = 0; i < vocab; ++i) {
      const double la = a[i] - ta - std::log(za), lb = b[i] - tb - std::log(zb);
      kl += std::exp(lb) * (lb - la);
    }
    d.max_kl = std::max(d.max_kl, kl);
    rms.push_back(std::sqrt(err / ref));
    d.same_argmax.push_back(argmax(a, vocab) == argmax(b, vocab));
    d.argmax_equal += d.same_argmax.back() ? 1 : 0;
  }
  std::nth_element(rms.begin(), rms.begin() + static_cast<int64_t>(rms.size() / 2), rms.end());
  d.median_relative_rms = rms[rms.size() / 2];
  return d;
}

const nlohmann::json& goldens() {
  static const nlohmann::json all = [] {
    std::ifstream in(kGoldens + "goldens.json");
    return nlohmann::json::parse(in);
  }();
  return all;
}

// ---- k3-nano, float32 ----

class NanoF32 : public ::testing::TestWithParam<int64_t> {};

TEST_P(NanoF32, Teacher300IsWithinOneThousandthAtEveryPosition) {
  const Model m = Model::open(kNano);
  const auto e = m.executor(options());
  const auto ids = goldens()["teacher300"]["ids"].get<std::vector<int32_t>>();
  const Distance d =
      compare(feed(*e, ids, GetParam()), read_f32(kGoldens + "teacher300.logits.f32"), 2048);
  EXPECT_LT(d.max_abs, 1e-3);
  EXPECT_EQ(d.argmax_equal, 300);
  RecordProperty("max_abs", std::to_string(d.max_abs));
  std::printf("max |difference| %.2e\n", d.max_abs);
}
INSTANTIATE_TEST_SUITE_P(PrefillChunksAndWalk, NanoF32, ::testing::Values(1, 7, 64, 300));

std::vector<std::string> case_names() {
  std::vector<std::string> names;
  for (const auto& [name, value] : goldens().items()) {
    if (value.contains("greedy_ids")) names.push_back(name);
  }
  return names;
}

class NanoCase : public ::testing::TestWithParam<std::string> {};

TEST_P(NanoCase, GreedyIdsAndLastPromptLogitsAreTheGoldens) {
  const auto& g = goldens()[GetParam()];
  const Model m = Model::open(kNano);
  const auto e = m.executor(options());
  auto ids = g["prompt_ids"].get<std::vector<int32_t>>();
  const auto greedy = g["greedy_ids"].get<std::vector<int32_t>>();
  const auto want = read_f32(kGoldens + GetParam() + ".last_prompt_logits.f32");
  const std::vector<int32_t> pages = iota_pages(static_cast<int64_t>(ids.size() + greedy.size()));
  StepResult result;
  ASSERT_TRUE(e->step({{{0, 0, ids, pages, Logits::kLast}}}, &result).ok());
  double max_abs = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    max_abs = std::max(max_abs, std::fabs(static_cast<double>(result.logits[i]) - want[i]));
  }
  EXPECT_LT(max_abs, 1e-3);
  for (size_t step = 0; step < greedy.size(); ++step) {
    const auto next = static_cast<int32_t>(argmax(result.logits.data(), 2048));
    ASSERT_EQ(next, greedy[step]) << "step " << step;
    const auto& top5 = g["top5"][step];
    for (const auto& entry : top5) {
      // The file keeps four decimals.
      EXPECT_NEAR(result.logits[entry[0].get<size_t>()], entry[1].get<double>(), 1e-3 + 5e-5);
    }
    const auto position = static_cast<int64_t>(ids.size() + step);
    ASSERT_TRUE(e->step({{{0, position, {&next, 1}, pages, Logits::kLast}}}, &result).ok());
  }
}
INSTANTIATE_TEST_SUITE_P(All, NanoCase, ::testing::ValuesIn(case_names()),
                         [](const auto& param) { return param.param; });

// ---- k3-nano, bf16 landings ----

TEST(NanoBf16, TeacherForcedIsWithinItsBounds) {
  const Model m = Model::open(kNano);
  const auto e = m.executor(options(Numerics::kBf16));
  const auto ids = goldens()["teacher300"]["ids"].get<std::vector<int32_t>>();
  const Distance d = compare(feed(*e, ids, 64), read_f32(kGoldens + "teacher300.logits.f32"), 2048);
  std::printf("median relative rms %.4f, argmax %lld of 300\n", d.median_relative_rms,
              static_cast<long long>(d.argmax_equal));
  EXPECT_LT(d.median_relative_rms, 2e-2);
  EXPECT_GE(d.argmax_equal, 292);
}

TEST_P(NanoCase, Bf16ArgmaxIsEqualWhereverTheMarginExceedsHalf) {
  const auto& g = goldens()[GetParam()];
  const Model m = Model::open(kNano);
  const auto e = m.executor(options(Numerics::kBf16));
  auto ids = g["prompt_ids"].get<std::vector<int32_t>>();
  const auto prompt = static_cast<int64_t>(ids.size());
  const auto greedy = g["greedy_ids"].get<std::vector<int32_t>>();
  ids.insert(ids.end(), greedy.begin(), greedy.end() - 1);
  const std::vector<float> logits = feed(*e, ids, 64);
  for (size_t step = 0; step < greedy.size(); ++step) {
    if (g["margin"][step].get<double>() <= 0.5) continue;
    const float* row = logits.data() + (prompt - 1 + static_cast<int64_t>(step)) * 2048;
    EXPECT_EQ(argmax(row, 2048), greedy[step]) << "step " << step;
  }
}

// ---- the tiny checkpoints ----

struct TinyCase {
  const char* checkpoint;
  int64_t chunk;
};
class TinyF32 : public ::testing::TestWithParam<TinyCase> {};

TEST_P(TinyF32, EveryPositionIsWithinOneThousandth) {
  const std::string name = GetParam().checkpoint;
  const Model m = Model::open(kOracleModels + name);
  const auto e = m.executor(options());
  const auto short_ids = read_ids(kOracleData + name + ".ref.tokens.txt");
  const Distance d = compare(feed(*e, short_ids, GetParam().chunk),
                             read_f32(kOracleData + name + ".ref.logits.f32"), 512);
  EXPECT_LT(d.max_abs, 1e-3);
  EXPECT_EQ(d.argmax_equal, 72);
  const auto long_ids = read_ids(kOracleData + "prompt300.txt");
  const Distance p = compare(feed(*e, long_ids, GetParam().chunk),
                             read_f32(kOracleData + name + ".p300.ref.logits.f32"), 512);
  std::printf("max |difference| %.2e and %.2e\n", d.max_abs, p.max_abs);
  EXPECT_LT(p.max_abs, 1e-3);
}
INSTANTIATE_TEST_SUITE_P(PrefillChunksAndWalk, TinyF32,
                         ::testing::Values(TinyCase{"tiny_k3", 300}, TinyCase{"tiny_k3", 16},
                                           TinyCase{"tiny_k3", 1}, TinyCase{"tiny128_k3_calm", 300},
                                           TinyCase{"tiny128_k3_calm", 16},
                                           TinyCase{"tiny128_k3_calm", 1}));

TEST(TinyBf16, TeacherForcedIsWithinItsBounds) {
  const std::string name = "tiny128_k3_calm";
  const Model m = Model::open(kOracleModels + name);
  const auto e = m.executor(options(Numerics::kBf16));
  const Distance d = compare(feed(*e, read_ids(kOracleData + name + ".ref.tokens.txt"), 72),
                             read_f32(kOracleData + name + ".ref.logits.f32"), 512);
  std::printf("median relative rms %.4f, argmax %lld of 72, max KL %.4f\n", d.median_relative_rms,
              static_cast<long long>(d.argmax_equal), d.max_kl);
  EXPECT_LT(d.median_relative_rms, 3e-2);
  EXPECT_GE(d.argmax_equal, 66);
  EXPECT_LT(d.max_kl, 5e-2);
}

// The HF module's epsilon in the two LoRA norms moves the logits by less than the bound above, so
// the option needs a sharper gate: each value must be nearer to its own reference than to the
// other's.
class LoraEps : public ::testing::TestWithParam<const char*> {};

TEST_P(LoraEps, EachValueFollowsItsOwnReference) {
  const std::string name = GetParam();
  const Model m = Model::open(kOracleModels + name);
  const auto ids = read_ids(kOracleData + name + ".ref.tokens.txt");
  ASSERT_EQ(ids, read_ids(kOracleData + name + ".ref_hfeps.tokens.txt"));
  const auto serving = read_f32(kOracleData + name + ".ref.logits.f32");
  const auto hf = read_f32(kOracleData + name + ".ref_hfeps.logits.f32");
  const double apart = compare(hf, serving, 512).max_abs;
  CpuExecutorOptions o = options();
  const auto with_serving = feed(*m.executor(o), ids, 72);
  o.policy.lora_norm_eps = 1e-6f;
  const auto with_hf = feed(*m.executor(o), ids, 72);
  std::printf("the references differ by %.2e\n", apart);
  EXPECT_LT(compare(with_serving, serving, 512).max_abs, apart / 2);
  EXPECT_LT(compare(with_hf, hf, 512).max_abs, apart / 2);
  EXPECT_GT(compare(with_hf, serving, 512).max_abs, apart / 2);  // the control
}
INSTANTIATE_TEST_SUITE_P(All, LoraEps, ::testing::Values("tiny_k3", "tiny128_k3_calm"));

}  // namespace
}  // namespace k3::gates
