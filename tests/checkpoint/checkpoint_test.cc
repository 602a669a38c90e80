#include "checkpoint/checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "checkpoint/manifest.h"
#include "checkpoint_fixture.h"

namespace k3 {
namespace {

namespace fs = std::filesystem;
using ::testing::Contains;
using ::testing::HasSubstr;
using testing::MicroCheckpoint;

std::string nano_dir() { return std::string(K3_SOURCE_DIR) + "/models/k3-nano"; }

std::unique_ptr<Checkpoint> open_or_fail(const std::string& dir, int64_t layers = 0,
                                         RankSpec rank = {}) {
  Result<ModelConfig> config = load_model_config(dir);
  EXPECT_TRUE(config.ok()) << config.status().message();
  if (layers > 0) config = truncate_layers(*config, layers);
  auto r = Checkpoint::open(dir, *config, rank);
  EXPECT_TRUE(r.ok()) << r.status().message();
  return r.ok() ? std::move(r).value() : nullptr;
}

TEST(Checkpoint, OpensK3NanoAndTheOracleCheckpoints) {
  const auto nano = open_or_fail(nano_dir());
  ASSERT_TRUE(nano);
  EXPECT_EQ(nano->num_tensors(), 2644);
  EXPECT_EQ(nano->total_bytes(), 31'974'912);
  for (const auto& [name, bytes] :
       {std::pair{"tiny_k3", 11'649'728}, std::pair{"tiny128_k3_calm", 17'405'312}}) {
    const auto c = open_or_fail(std::string(K3_BINARY_DIR) + "/oracle/" + name);
    ASSERT_TRUE(c);
    EXPECT_EQ(c->num_tensors(), 1386);
    EXPECT_EQ(c->total_bytes(), bytes);
    EXPECT_TRUE(c->plan().notes.empty());
  }
}

TEST(Checkpoint, ViewsAreTheBytesOfTheFiles) {
  const MicroCheckpoint micro;
  const auto c = open_or_fail(micro.dir());
  ASSERT_TRUE(c);
  int64_t seen = 0;
  for (const auto& entry : fs::directory_iterator(micro.dir())) {
    if (entry.path().extension() != ".safetensors") continue;
    for (const auto& [name, raw] : testing::read_shard(entry.path())) {
      const TensorView* view = c->find(name.substr(testing::kPrefix.size()));
      ASSERT_NE(view, nullptr) << name;
      EXPECT_EQ(view->shape, raw.shape);
      EXPECT_EQ(dtype_name(view->dtype), raw.dtype);
      ASSERT_EQ(view->bytes, static_cast<int64_t>(raw.data.size()));
      EXPECT_EQ(std::memcmp(view->data, raw.data.data(), raw.data.size()), 0) << name;
      ++seen;
    }
  }
  EXPECT_EQ(seen, c->num_tensors());
  EXPECT_EQ(c->find("language_model.lm_head.weight"), nullptr);
  EXPECT_EQ(c->find("nonsense"), nullptr);
}

TEST(Checkpoint, NamesMayLackThePrefix) {
  const MicroCheckpoint with;
  const MicroCheckpoint without([](SynthOptions* o) { o->language_model_prefix = false; });
  EXPECT_TRUE(without.index()["weight_map"].contains("lm_head.weight"));
  const auto a = open_or_fail(with.dir()), b = open_or_fail(without.dir());
  ASSERT_TRUE(a && b);
  const TensorView* x = a->find("lm_head.weight");
  const TensorView* y = b->find("lm_head.weight");
  ASSERT_TRUE(x && y);
  EXPECT_EQ(std::memcmp(x->data, y->data, static_cast<size_t>(x->bytes)), 0);
}

TEST(Checkpoint, AFileWithoutHeaderPaddingLoadsUnaligned) {
  const MicroCheckpoint micro;
  const testing::RawShard first = testing::read_shard(
      micro.path(micro.shard_of(testing::kPrefix + "model.embed_tokens.weight")));
  for (const char* padding : {"", " ", "  ", "   "}) {
    const MicroCheckpoint single;
    single.merge_into_single_file(padding);
    const auto c = open_or_fail(single.dir());
    ASSERT_TRUE(c);
    const TensorView* view = c->find("model.embed_tokens.weight");
    ASSERT_NE(view, nullptr);
    const std::string& raw = first.at(testing::kPrefix + "model.embed_tokens.weight").data;
    EXPECT_EQ(std::memcmp(view->data, raw.data(), raw.size()), 0);
  }
}

TEST(Checkpoint, AnIndexWinsOverASingleFileAndSaysSo) {
  const MicroCheckpoint micro;
  testing::write_file(micro.path("model.safetensors"), "never read");
  const auto c = open_or_fail(micro.dir());
  ASSERT_TRUE(c);
  EXPECT_THAT(c->plan().notes,
              Contains(HasSubstr("ignored, not named by "
                                 "model.safetensors.index.json: model.safetensors")));
}

TEST(Checkpoint, ATotalSizeThatIsNotSoIsNoted) {
  const MicroCheckpoint micro;
  auto index = micro.index();
  index["metadata"]["total_size"] = 5;
  micro.write_index(index);
  const auto c = open_or_fail(micro.dir());
  ASSERT_TRUE(c);
  EXPECT_THAT(c->plan().notes, Contains(HasSubstr("total_size says 5 bytes, the shards hold ")));
}

TEST(Checkpoint, VisionTensorsAreSkippedByNameAndCounted) {
  const MicroCheckpoint micro;
  const std::string shard = micro.shard_of(testing::kPrefix + "lm_head.weight");
  micro.add("vision_tower.patch.weight", {"F16", {3}, "abcdef"}, shard);
  micro.add("mm_projector.weight", {"BF16", {2}, "abcd"}, shard);
  micro.edit_index([](nlohmann::json& map) { map["vision_tower.far"] = "vision.safetensors"; });
  const auto c = open_or_fail(micro.dir());  // vision.safetensors need not exist
  ASSERT_TRUE(c);
  EXPECT_EQ(c->plan().skipped_vision, (TensorCount{3, 10}));
  EXPECT_EQ(c->find("vision_tower.patch.weight"), nullptr);
}

TEST(Checkpoint, EachRankHoldsItsBlockOfExpertsAndTheRanksTogetherAll) {
  const auto whole = open_or_fail(nano_dir());
  ASSERT_TRUE(whole);
  std::vector<std::unique_ptr<Checkpoint>> ranks;
  for (int64_t r = 0; r < 4; ++r) ranks.push_back(open_or_fail(nano_dir(), 0, {4, r}));
  for (const TensorSpec& spec : build_manifest(*load_model_config(nano_dir()))) {
    for (int64_t r = 0; r < 4; ++r) {
      const TensorView* view = ranks[static_cast<size_t>(r)]->find(spec.name);
      const bool holds = spec.expert < 0 || spec.expert / 8 == r;
      ASSERT_EQ(view != nullptr, holds) << spec.name << " rank " << r;
      if (view) {
        const TensorView* reference = whole->find(spec.name);
        ASSERT_EQ(view->bytes, reference->bytes);
        EXPECT_EQ(std::memcmp(view->data, reference->data, static_cast<size_t>(view->bytes)), 0);
      }
    }
  }
  EXPECT_EQ(ranks[2]->rank().ep_rank, 2);
  EXPECT_EQ(ranks[2]->total_bytes() + ranks[2]->plan().other_ranks.bytes, whole->total_bytes());
}

TEST(Checkpoint, AnIllegalRankIsRefusedBeforeAnyFileIsRead) {
  const auto r = Checkpoint::open("/nonexistent", *synth_preset("tiny"), {5, 0});
  EXPECT_EQ(r.status().code(), ErrorCode::kInvalidArgument);
  EXPECT_THAT(r.status().message(), HasSubstr("found 5, expected a divisor of num_experts = 32"));
}

TEST(Checkpoint, ACutModelSkipsLaterLayersAndCountsThem) {
  const auto whole = open_or_fail(nano_dir());
  const auto cut = open_or_fail(nano_dir(), 5);
  ASSERT_TRUE(whole && cut);
  EXPECT_EQ(cut->num_tensors() + cut->plan().skipped_layers.tensors, whole->num_tensors());
  EXPECT_NE(cut->find("model.layers.4.input_layernorm.weight"), nullptr);
  EXPECT_EQ(cut->find("model.layers.5.input_layernorm.weight"), nullptr);
  EXPECT_NE(cut->find("lm_head.weight"), nullptr);
}

TEST(Checkpoint, ACutModelNeedsOnlyTheShardsItUses) {
  const MicroCheckpoint micro;
  const std::string last_layer = micro.shard_of(
      testing::kPrefix + "model.layers.3.block_sparse_moe.experts.3.w1.weight_scale");
  ASSERT_NE(last_layer, micro.shard_of(testing::kPrefix + "lm_head.weight"));
  ASSERT_NE(last_layer,
            micro.shard_of(testing::kPrefix +
                           "model.layers.1.block_sparse_moe.experts.7.w3.weight_scale"));
  fs::remove(micro.path(last_layer));
  EXPECT_TRUE(open_or_fail(micro.dir(), 2));
  EXPECT_THAT(micro.refusal(), HasSubstr("no such file"));
}

TEST(Checkpoint, WarmReadsEveryHeldByteAndReportsIt) {
  for (const RankSpec rank : {RankSpec{1, 0}, RankSpec{4, 1}}) {
    const auto c = open_or_fail(nano_dir(), 0, rank);
    ASSERT_TRUE(c);
    int64_t last = 0, calls = 0;
    const Status s = c->warm([&](int64_t done, int64_t total) {
      EXPECT_GT(done, last);
      EXPECT_EQ(total, c->total_bytes());
      last = done;
      ++calls;
    });
    EXPECT_TRUE(s.ok()) << s.message();
    EXPECT_EQ(last, c->total_bytes());
    EXPECT_GT(calls, 1);
    EXPECT_TRUE(c->warm().ok());
  }
}

TEST(Checkpoint, WarmRefusesAFileThatShrankSinceOpening) {
  const MicroCheckpoint micro;
  const auto c = open_or_fail(micro.dir());
  ASSERT_TRUE(c);
  const fs::path file = micro.path(micro.shard_of(testing::kPrefix + "lm_head.weight"));
  const auto size = fs::file_size(file);
  fs::resize_file(file, size - 1);
  const Status s = c->warm();
  EXPECT_EQ(s.code(), ErrorCode::kCheckpoint);
  EXPECT_THAT(s.message(), HasSubstr(file.filename().string()));
}

}  // namespace
}  // namespace k3
