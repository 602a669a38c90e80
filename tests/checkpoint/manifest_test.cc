#include "checkpoint/manifest.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "checkpoint/inspect.h"
#include "checkpoint/load_plan.h"
#include "checkpoint/synth.h"

namespace k3 {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

LoadPlan plan_of(int64_t layers, int64_t experts, RankSpec rank = {}) {
  const Result<ModelConfig> c = synth_preset("k3", layers, experts);
  EXPECT_TRUE(c.ok()) << c.status().message();
  const Result<LoadPlan> plan = plan_load(*c, rank);
  EXPECT_TRUE(plan.ok()) << plan.status().message();
  return *plan;
}

TEST(Manifest, TotalsOfTheReleaseAreThePublishedOnes) {
  const LoadPlan p = plan_of(0, 0);
  EXPECT_EQ(p.held, (TensorCount{497'052, 1'559'965'606'912}));
  EXPECT_EQ(p.group(TensorGroup::kRoutedExperts).bytes, 1'446'456'066'048);
  EXPECT_EQ(p.group(TensorGroup::kKdaAttention).bytes, 69 * int64_t{887'800'832});
  EXPECT_EQ(p.group(TensorGroup::kMlaAttention).bytes, 24 * int64_t{464'392'192});
  EXPECT_EQ(p.group(TensorGroup::kDenseMlp).bytes, 1'453'326'336);
  EXPECT_EQ(p.group(TensorGroup::kRouter).bytes + p.group(TensorGroup::kLatent).bytes +
                p.group(TensorGroup::kSharedExperts).bytes,
            92 * int64_t{379'857'408});
  EXPECT_EQ(p.group(TensorGroup::kNorms).bytes, 93 * 86'016 + 3 * 7168 * 2);
  EXPECT_EQ(p.group(TensorGroup::kEmbedding).bytes + p.group(TensorGroup::kHead).bytes + 3 * 14336,
            4'697'663'488);
}

TEST(Manifest, TotalsOfThePrunedReleaseAreThePublishedOnes) {
  const LoadPlan p = plan_of(0, 224);
  EXPECT_EQ(p.held, (TensorCount{126'108, 474'237'001'216}));
  EXPECT_EQ(p.group(TensorGroup::kRoutedExperts).bytes, 361'614'016'512);
}

TEST(Manifest, OneExpertMoreOrLessIsNotThePublishedTotal) {
  EXPECT_NE(plan_of(0, 895).held.bytes, 1'559'965'606'912);
  EXPECT_NE(plan_of(92, 0).held.tensors, 497'052);
}

TEST(Manifest, ShapesOfTheReleaseFollowTheTable) {
  const ModelConfig c = *synth_preset("k3", 8, 16);
  std::map<std::string, TensorSpec> by_name;
  for (const TensorSpec& spec : build_manifest(c)) by_name[spec.name] = spec;
  const auto expect = [&](const std::string& name, DType dtype, std::vector<int64_t> shape) {
    ASSERT_TRUE(by_name.contains(name)) << name;
    EXPECT_EQ(by_name[name].dtype, dtype) << name;
    EXPECT_EQ(by_name[name].shape, shape) << name;
  };
  using enum DType;
  expect("model.embed_tokens.weight", kBF16, {163840, 7168});
  expect("lm_head.weight", kBF16, {163840, 7168});
  expect("model.output_attn_res_proj.weight", kBF16, {1, 7168});
  expect("model.layers.0.mlp.gate_proj.weight", kBF16, {33792, 7168});
  expect("model.layers.0.mlp.down_proj.weight", kBF16, {7168, 33792});
  expect("model.layers.0.self_attn.q_proj.weight", kBF16, {12288, 7168});
  expect("model.layers.0.self_attn.v_conv1d.weight", kF32, {12288, 1, 4});
  expect("model.layers.0.self_attn.A_log", kF32, {128});
  expect("model.layers.0.self_attn.dt_bias", kF32, {12288});
  expect("model.layers.0.self_attn.o_norm.weight", kF32, {128});
  expect("model.layers.0.self_attn.f_a_proj.weight", kBF16, {128, 7168});
  expect("model.layers.0.self_attn.f_b_proj.weight", kBF16, {12288, 128});
  expect("model.layers.0.self_attn.b_proj.weight", kBF16, {96, 7168});
  expect("model.layers.0.self_attn.o_proj.weight", kBF16, {7168, 12288});
  expect("model.layers.3.self_attn.q_a_proj.weight", kBF16, {1536, 7168});
  expect("model.layers.3.self_attn.q_b_proj.weight", kBF16, {18432, 1536});
  expect("model.layers.3.self_attn.kv_a_proj_with_mqa.weight", kBF16, {576, 7168});
  expect("model.layers.3.self_attn.kv_a_layernorm.weight", kBF16, {512});
  expect("model.layers.3.self_attn.kv_b_proj.weight", kBF16, {24576, 512});
  expect("model.layers.3.self_attn.g_proj.weight", kBF16, {12288, 7168});
  expect("model.layers.1.block_sparse_moe.gate.weight", kBF16, {16, 7168});
  expect("model.layers.1.block_sparse_moe.gate.e_score_correction_bias", kF32, {16});
  expect("model.layers.1.block_sparse_moe.routed_expert_down_proj.weight", kBF16, {3584, 7168});
  expect("model.layers.1.block_sparse_moe.routed_expert_up_proj.weight", kBF16, {7168, 3584});
  expect("model.layers.1.block_sparse_moe.routed_expert_norm.weight", kBF16, {3584});
  expect("model.layers.1.block_sparse_moe.shared_experts.down_proj.weight", kBF16, {7168, 6144});
  expect("model.layers.1.block_sparse_moe.experts.15.w1.weight_packed", kU8, {3072, 1792});
  expect("model.layers.1.block_sparse_moe.experts.15.w3.weight_scale", kU8, {3072, 112});
  expect("model.layers.1.block_sparse_moe.experts.0.w2.weight_packed", kU8, {3584, 1536});
  expect("model.layers.1.block_sparse_moe.experts.0.w2.weight_scale", kU8, {3584, 96});
}

TEST(Manifest, NamesAreUniqueAndCarryTheirLayer) {
  const std::vector<TensorSpec> all = build_manifest(*synth_preset("tiny"));
  std::set<std::string> names;
  for (const TensorSpec& spec : all) {
    EXPECT_TRUE(names.insert(spec.name).second) << spec.name;
    EXPECT_EQ(layer_of_name(spec.name), spec.layer) << spec.name;
  }
  EXPECT_EQ(all.size(), 2644u);
}

TEST(Manifest, ALogIsPaddedToTheHeadDimension) {
  ModelConfig c;
  c.kda_num_heads = 96;
  c.kda_head_dim = 128;
  EXPECT_EQ(a_log_length(c), 128);
  c.kda_num_heads = 160;
  EXPECT_EQ(a_log_length(c), 160);
}

TEST(Manifest, LayerNumbersAreReadStrictly) {
  EXPECT_EQ(layer_of_name("model.layers.92.input_layernorm.weight"), 92);
  for (const char* name : {"model.layers.", "model.layers.3", "model.layers.x.y",
                           "model.layers.-1.a", "model.layers.03.a", "model.norm.weight",
                           "layers.3.a", "model.layers.99999999999999999999.a"}) {
    EXPECT_EQ(layer_of_name(name), -1) << name;
  }
}

TEST(LoadPlan, RanksShareTheExpertsInBlocksAndReplicateTheRest) {
  const LoadPlan whole = plan_of(0, 0);
  int64_t experts_bytes = 0, next = 0;
  for (int64_t r = 0; r < 16; ++r) {
    const LoadPlan p = plan_of(0, 0, {16, r});
    EXPECT_EQ(p.first_expert, next);
    EXPECT_EQ(p.end_expert - p.first_expert, 56);
    next = p.end_expert;
    experts_bytes += p.group(TensorGroup::kRoutedExperts).bytes;
    EXPECT_EQ(p.held.bytes + p.other_ranks.bytes, whole.held.bytes);
    EXPECT_EQ(p.group(TensorGroup::kKdaAttention), whole.group(TensorGroup::kKdaAttention));
  }
  EXPECT_EQ(next, 896);
  EXPECT_EQ(experts_bytes, whole.group(TensorGroup::kRoutedExperts).bytes);
  // 189.9 GiB a rank, as measured on the release.
  EXPECT_NEAR(static_cast<double>(plan_of(0, 0, {16, 3}).held.bytes) / (1ll << 30), 189.9, 0.05);
}

TEST(LoadPlan, IllegalRanksAreRefused) {
  const ModelConfig c = *synth_preset("tiny");
  for (const RankSpec rank : {RankSpec{3, 0}, RankSpec{0, 0}, RankSpec{-1, 0}, RankSpec{64, 0}}) {
    const Status s = plan_load(c, rank).status();
    EXPECT_EQ(s.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(s.message(), HasSubstr("expected a divisor of num_experts = 32"));
  }
  for (const RankSpec rank : {RankSpec{4, 4}, RankSpec{4, -1}}) {
    EXPECT_THAT(plan_load(c, rank).status().message(), HasSubstr("expected 0 to 3"));
  }
}

TEST(StateBytes, OfTheReleaseAreTheKnownOnes) {
  const StateBytes s = state_bytes(*synth_preset("k3"));
  EXPECT_EQ(s.kda_recurrent_per_slot, 434'110'464);
  EXPECT_EQ(s.kda_conv_per_slot, 15'261'696);
  EXPECT_EQ(s.mla_cache_per_token, 27'648);
}

}  // namespace
}  // namespace k3
