#include "checkpoint/inspect.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "checkpoint_fixture.h"

namespace k3 {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::MicroCheckpoint;

std::string nano_dir() { return std::string(K3_SOURCE_DIR) + "/models/k3-nano"; }

TEST(Inspect, DescribesK3Nano) {
  const Result<InspectReport> r = inspect_checkpoint(nano_dir(), {4, 0});
  ASSERT_TRUE(r.ok()) << r.status().message();
  EXPECT_TRUE(r->coverage.ok()) << r->coverage.message();
  EXPECT_EQ(r->num_files, 4);
  EXPECT_EQ(r->whole.held, (TensorCount{2644, 31'974'912}));
  ASSERT_EQ(r->ranks.size(), 4u);
  EXPECT_EQ(r->ranks[3].first_expert, 24);
  EXPECT_EQ(r->ranks[3].end_expert, 32);
  EXPECT_EQ(r->state.kda_recurrent_per_slot, 9 * 2 * 128 * 128 * 4);
  EXPECT_EQ(r->state.kda_conv_per_slot, 9 * 3 * 3 * 256 * 2);
  EXPECT_EQ(r->state.mla_cache_per_token, 4 * 576 * 2);
  const std::string text = render_text(*r);
  for (const char* part : {"complete: 2,644 tensors in 4 files, names with language_model.",
                           "KDA         0-2, 4-6, 8-10", "MLA         3, 7, 11-12",
                           "snapshots   0, 4, 8, 12 (every 4)", "31,974,912",
                           "rank 3 of 4: experts 24 to 31", "eos 1794, 1793"}) {
    EXPECT_THAT(text, HasSubstr(part));
  }
}

TEST(Inspect, JsonSaysTheSameAsTheReport) {
  const Result<InspectReport> r = inspect_checkpoint(nano_dir(), {2, 5});
  ASSERT_TRUE(r.ok());
  const json j = json::parse(render_json(*r));
  EXPECT_EQ(j["coverage"]["complete"], true);
  EXPECT_EQ(j["config"]["num_hidden_layers"], 5);
  EXPECT_EQ(j["config"]["num_checkpoint_layers"], 13);
  EXPECT_EQ(j["layers"]["mla"], json({3}));
  EXPECT_EQ(j["layers"]["snapshots"], json({0, 4}));
  EXPECT_EQ(j["weights"]["total"]["bytes"], r->whole.held.bytes);
  int64_t sum = 0;
  for (const json& group : j["weights"]["groups"]) sum += group["bytes"].get<int64_t>();
  EXPECT_EQ(sum, r->whole.held.bytes);
  EXPECT_EQ(j["ranks"].size(), 2u);
  EXPECT_EQ(j["ranks"][1]["first_expert"], 16);
  EXPECT_EQ(j["coverage"]["skipped_layers"]["tensors"], r->whole.skipped_layers.tensors);
  EXPECT_EQ(j["state"]["mla_cache_bytes_per_token"], 1152);
}

TEST(Inspect, EveryRankHasThePlanThatLoadingItWouldHave) {
  const ModelConfig config = *load_model_config(nano_dir());
  const Result<InspectReport> r = inspect_checkpoint(nano_dir(), {8, 0});
  ASSERT_TRUE(r.ok());
  for (int64_t rank = 0; rank < 8; ++rank) {
    const LoadPlan plan = *plan_load(config, {8, rank});
    const LoadPlan& shown = r->ranks[static_cast<size_t>(rank)];
    EXPECT_EQ(shown.groups, plan.groups);
    EXPECT_EQ(shown.first_expert, plan.first_expert);
    EXPECT_EQ(shown.end_expert, plan.end_expert);
    EXPECT_EQ(shown.held, plan.held);
  }
}

TEST(Inspect, WeightsThatAreWrongAreReportedNotFatal) {
  const MicroCheckpoint m;
  m.remove(testing::kPrefix + "lm_head.weight");
  const Result<InspectReport> r = inspect_checkpoint(m.dir(), {});
  ASSERT_TRUE(r.ok());
  EXPECT_EQ(r->coverage.code(), ErrorCode::kCheckpoint);
  EXPECT_THAT(render_text(*r), AllOf(HasSubstr("NOT USABLE: "), HasSubstr("1 missing: lm_head")));
  const json j = json::parse(render_json(*r));
  EXPECT_EQ(j["coverage"]["complete"], false);
  EXPECT_THAT(j["coverage"]["problem"].get<std::string>(), HasSubstr("lm_head.weight"));
}

// A sparse file of headers alone has its payload as holes; were any of it read, the A_log tails set
// to non-zero here would be noticed, as Checkpoint::open notices them.
TEST(Inspect, ReadsNoPayload) {
  const MicroCheckpoint m;
  const std::string name = testing::kPrefix + "model.layers.0.self_attn.A_log";
  m.edit_shard_of(name, [&](testing::RawShard& s) { s[name].data.assign(64, '\x3f'); });
  EXPECT_TRUE(inspect_checkpoint(m.dir(), {})->coverage.ok());
  EXPECT_THAT(m.refusal(), HasSubstr("A_log: element 2"));
}

TEST(Inspect, OptionsAndConfigsThatCannotBeAreErrors) {
  EXPECT_EQ(inspect_checkpoint(nano_dir(), {5, 0}).status().code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(inspect_checkpoint(nano_dir(), {0, 0}).status().code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(inspect_checkpoint(nano_dir(), {1, 14}).status().code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(inspect_checkpoint("/nonexistent", {}).status().code(), ErrorCode::kCheckpoint);
}

}  // namespace
}  // namespace k3
