// One named test for each way a checkpoint can be wrong: all are refused, none by a crash, each
// with a message that names the thing.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "checkpoint/checkpoint.h"
#include "checkpoint_fixture.h"

namespace k3 {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::kPrefix;
using testing::MicroCheckpoint;
using ::testing::Not;
using testing::RawShard;

const std::string kALog = "model.layers.0.self_attn.A_log";
const std::string kHead = "lm_head.weight";

TEST(Corruption, TheUnbrokenFixtureOpens) { EXPECT_EQ(MicroCheckpoint().refusal(), "(accepted)"); }

TEST(Corruption, ADeletedTensorIsNamed) {
  const MicroCheckpoint m;
  m.remove(kPrefix + kALog);
  EXPECT_THAT(m.refusal(), HasSubstr("1 missing: " + kALog));
}

TEST(Corruption, ManyMissingTensorsAreListedTenAtATime) {
  const MicroCheckpoint m;
  m.edit_index([](json& map) {
    for (auto it = map.begin(); it != map.end();) {
      it = it.key().find(".experts.") != std::string::npos ? map.erase(it) : std::next(it);
    }
  });
  EXPECT_THAT(m.refusal(), AllOf(HasSubstr("192 missing: "), HasSubstr("... (192 in all)")));
}

TEST(Corruption, AnUnexpectedTensorIsNamed) {
  const MicroCheckpoint m;
  m.add(kPrefix + "model.layers.1.extra.weight", {"U8", {1}, "x"}, m.shard_of(kPrefix + kHead));
  EXPECT_THAT(m.refusal(), HasSubstr("1 unexpected: language_model.model.layers.1.extra.weight"));
}

TEST(Corruption, AnUnprefixedStrangerInAPrefixedCheckpointIsUnexpected) {
  const MicroCheckpoint m;
  m.add("foo.weight", {"U8", {1}, "x"}, m.shard_of(kPrefix + kHead));
  EXPECT_THAT(m.refusal(), HasSubstr("1 unexpected: foo.weight"));
}

TEST(Corruption, ALayerBeyondTheConfigIsUnexpected) {
  const MicroCheckpoint m;
  m.add(kPrefix + "model.layers.5.input_layernorm.weight", {"U8", {1}, "x"},
        m.shard_of(kPrefix + kHead));
  EXPECT_THAT(m.refusal(), HasSubstr("1 unexpected: language_model.model.layers.5.input"));
}

TEST(Corruption, PackedWeightsOutsideTheRoutedExpertsAreUnexpected) {
  const MicroCheckpoint m;
  m.add(kPrefix + "model.layers.1.block_sparse_moe.shared_experts.up_proj.weight_packed",
        {"U8", {1}, "x"}, m.shard_of(kPrefix + kHead));
  EXPECT_THAT(m.refusal(), HasSubstr("shared_experts.up_proj.weight_packed"));
}

TEST(Corruption, UnquantisedExpertsAreRefusedByName) {
  const MicroCheckpoint m;
  const std::string expert = kPrefix + "model.layers.1.block_sparse_moe.experts.0.w1.";
  const std::string shard = m.shard_of(expert + "weight_packed");
  m.remove(expert + "weight_packed");
  m.remove(expert + "weight_scale");
  m.add(expert + "weight", {"U8", {1}, "x"}, shard);
  EXPECT_THAT(m.refusal(), AllOf(HasSubstr("2 missing: "), HasSubstr("experts.0.w1.weight_scale"),
                                 HasSubstr("1 unexpected: " + expert + "weight")));
}

TEST(Corruption, AMixedPrefixIsRefused) {
  const MicroCheckpoint m;
  const std::string shard = m.shard_of(kPrefix + kHead);
  m.add(kHead, m.remove(kPrefix + kHead), shard);
  EXPECT_THAT(m.refusal(), AllOf(HasSubstr("has the prefix language_model."),
                                 HasSubstr("tensor lm_head.weight has not")));
}

TEST(Corruption, AWrongShapeIsNamedWithBoth) {
  const MicroCheckpoint m;
  m.edit_shard_of(kPrefix + kALog, [](RawShard& s) {
    s[kPrefix + kALog].shape = {2};
    s[kPrefix + kALog].data.resize(8);
  });
  EXPECT_THAT(m.refusal(),
              AllOf(HasSubstr("tensor model.layers.0.self_attn.A_log: shape [2], expected [16]"),
                    HasSubstr("2 live + zero tail")));
}

TEST(Corruption, ATransposedMatrixIsRefused) {
  const MicroCheckpoint m;
  const std::string name = "model.layers.0.self_attn.f_b_proj.weight";
  m.edit_shard_of(kPrefix + name, [&](RawShard& s) { s[kPrefix + name].shape = {16, 32}; });
  EXPECT_THAT(m.refusal(), HasSubstr("tensor " + name + ": shape [16, 32], expected [32, 16]"));
}

TEST(Corruption, AWrongDtypeIsNamedWithBoth) {
  const MicroCheckpoint m;
  m.edit_shard_of(kPrefix + kHead, [](RawShard& s) {
    s[kPrefix + kHead].dtype = "F32";
    s[kPrefix + kHead].data += s[kPrefix + kHead].data;
  });
  EXPECT_THAT(m.refusal(), HasSubstr("tensor lm_head.weight: dtype F32, expected BF16 (model-"));
}

TEST(Corruption, ADtypeOfTheSameSizeIsRefusedToo) {
  const MicroCheckpoint m;
  m.edit_shard_of(kPrefix + kHead, [](RawShard& s) { s[kPrefix + kHead].dtype = "F16"; });
  EXPECT_THAT(m.refusal(), HasSubstr("tensor lm_head.weight: dtype F16, expected BF16"));
}

TEST(Corruption, AnALogTailThatIsNotZeroIsRefused) {
  const MicroCheckpoint m;
  m.edit_shard_of(kPrefix + kALog, [](RawShard& s) {
    const float one = 1;
    std::memcpy(s[kPrefix + kALog].data.data() + 5 * 4, &one, 4);
  });
  EXPECT_THAT(m.refusal(), HasSubstr("tensor model.layers.0.self_attn.A_log: element 5: found 1, "
                                     "expected 0 behind the 2 heads"));
}

TEST(Corruption, TheLiveHeadsOfALogMayHoldAnything) {
  const MicroCheckpoint m;
  m.edit_shard_of(kPrefix + kALog, [](RawShard& s) {
    const float one = 1;
    std::memcpy(s[kPrefix + kALog].data.data() + 4, &one, 4);
  });
  EXPECT_EQ(m.refusal(), "(accepted)");
}

TEST(Corruption, AMissingShardIsNamedWithWhatItShouldHold) {
  const MicroCheckpoint m;
  const std::string shard = m.shard_of(kPrefix + kHead);
  fs::remove(m.path(shard));
  EXPECT_THAT(m.refusal(), AllOf(HasSubstr(shard + ": no such file"), HasSubstr("needed tensors")));
}

TEST(Corruption, AnEmptyShardIsRefused) {
  const MicroCheckpoint m;
  testing::write_file(m.path(m.shard_of(kPrefix + kHead)), "");
  EXPECT_THAT(m.refusal(), HasSubstr("the file is empty"));
}

TEST(Corruption, AnLfsPointerInPlaceOfAShardIsRecognised) {
  const MicroCheckpoint m;
  testing::write_file(m.path(m.shard_of(kPrefix + kHead)),
                      "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1000\n");
  EXPECT_THAT(m.refusal(), HasSubstr("a Git LFS pointer, not the file itself"));
}

TEST(Corruption, AnLfsPointerInPlaceOfTheIndexIsRecognised) {
  const MicroCheckpoint m;
  testing::write_file(m.path("model.safetensors.index.json"),
                      "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1000\n");
  EXPECT_THAT(m.refusal(), HasSubstr("a Git LFS pointer, not the file itself"));
}

TEST(Corruption, ATruncatedShardIsRefused) {
  const MicroCheckpoint m;
  const fs::path shard = m.path(m.shard_of(kPrefix + kHead));
  fs::resize_file(shard, fs::file_size(shard) - 1);
  EXPECT_THAT(m.refusal(), AllOf(HasSubstr(shard.filename().string()), HasSubstr("truncated?")));
}

TEST(Corruption, AnIndexThatNamesATensorItsShardLacksIsRefused) {
  const MicroCheckpoint m;
  m.edit_shard_of(kPrefix + kHead, [](RawShard& s) { s.erase(kPrefix + kHead); });
  EXPECT_THAT(m.refusal(),
              HasSubstr("lacks 1 tensors that the index places here: " + kPrefix + kHead));
}

TEST(Corruption, ATensorInAShardButNotInTheIndexIsRefused) {
  const MicroCheckpoint m;
  m.edit_shard_of(kPrefix + kHead, [](RawShard& s) { s["stranger"] = {"U8", {1}, "x"}; });
  EXPECT_THAT(m.refusal(), HasSubstr("stranger (not in the index)"));
}

TEST(Corruption, ATensorInTwoShardsIsRefused) {
  const MicroCheckpoint m;
  const std::string home = m.shard_of(kPrefix + kHead);
  const testing::RawTensor copy = testing::read_shard(m.path(home)).at(kPrefix + kHead);
  ASSERT_NE(m.shard_of(kPrefix + kALog), home);
  m.edit_shard_of(kPrefix + kALog, [&](RawShard& s) { s[kPrefix + kHead] = copy; });
  EXPECT_THAT(m.refusal(), HasSubstr("lm_head.weight (the index says " + home + ")"));
}

TEST(Corruption, ShardNamesThatLeaveTheDirectoryAreRefused) {
  for (const char* name : {"../model.safetensors", "/etc/x.safetensors", "a/b.safetensors", "",
                           "..", "x.bin", ".hidden.safetensors", "a\\b.safetensors"}) {
    const MicroCheckpoint m;
    m.edit_index([&](json& map) { map[kPrefix + kHead] = name; });
    EXPECT_THAT(m.refusal(), AllOf(HasSubstr("lm_head.weight: shard "),
                                   HasSubstr("expected the name of a .safetensors file")))
        << name;
  }
}

TEST(Corruption, ABrokenIndexIsRefused) {
  const MicroCheckpoint m;
  for (const auto& [text, message] :
       {std::pair{"", "the file is empty"}, std::pair{"{", "not JSON"},
        std::pair{"[]", "no object weight_map"}, std::pair{"{\"weight_map\": 3}", "no object"},
        std::pair{"{\"weight_map\": {\"a\": 1}}", "tensor a: found 1, expected a file name"},
        std::pair{"{\"weight_map\": {\"a\": \"x.safetensors\", \"a\": \"y.safetensors\"}}",
                  "appears twice"},
        std::pair{"{\"weight_map\": {}}", "missing: "}}) {
    testing::write_file(m.path("model.safetensors.index.json"), text);
    EXPECT_THAT(m.refusal(), HasSubstr(message));
  }
}

TEST(Corruption, ADirectoryWithoutWeightsIsRefused) {
  const MicroCheckpoint m;
  fs::remove(m.path("model.safetensors.index.json"));
  EXPECT_THAT(m.refusal(), HasSubstr("neither model.safetensors.index.json nor model.safetensors"));
  EXPECT_EQ(Checkpoint::open("/nonexistent", m.config(), {}).status().code(),
            ErrorCode::kCheckpoint);
}

TEST(Corruption, ALayerOfTheOtherAttentionKindIsNamed) {
  const MicroCheckpoint m;
  json config = json::parse(testing::read_file(m.path("config.json")));
  json& linear = config["text_config"]["linear_attn_config"];
  linear["full_attn_layers"] = {3, 5};
  linear["kda_layers"] = {1, 2, 4};
  testing::write_file(m.path("config.json"), config.dump());
  EXPECT_THAT(m.refusal(),
              AllOf(HasSubstr("layer 2: tensor model.layers.2.self_attn.A_log makes it KDA"),
                    HasSubstr("lists layer 3 (counted from one) in full_attn_layers")));
  linear["full_attn_layers"] = {5};
  linear["kda_layers"] = {1, 2, 3, 4};
  testing::write_file(m.path("config.json"), config.dump());
  EXPECT_THAT(m.refusal(), HasSubstr("layer 3: tensor model.layers.3.self_attn.kv_b_proj.weight "
                                     "makes it MLA"));
}

TEST(Corruption, AConfigWithAnotherExpertCountIsRefused) {
  const MicroCheckpoint m;
  json config = json::parse(testing::read_file(m.path("config.json")));
  config["text_config"]["num_experts"] = 9;
  testing::write_file(m.path("config.json"), config.dump());
  EXPECT_THAT(m.refusal(), AllOf(HasSubstr("24 missing: "), HasSubstr("experts.8.w1")));
  config["text_config"]["num_experts"] = 7;
  testing::write_file(m.path("config.json"), config.dump());
  EXPECT_THAT(m.refusal(), AllOf(HasSubstr("24 unexpected: "), HasSubstr("experts.7.w1")));
}

TEST(Corruption, ManyWrongShapesAreListedTenAtATime) {
  const MicroCheckpoint m;
  json config = json::parse(testing::read_file(m.path("config.json")));
  config["text_config"]["hidden_size"] = 96;
  testing::write_file(m.path("config.json"), config.dump());
  EXPECT_THAT(m.refusal(), AllOf(HasSubstr("model.embed_tokens.weight: shape [320, 64], expected "
                                           "[320, 96]"),
                                 HasSubstr(" in all)")));
}

// Flips every byte of a header in turn: the checkpoint opens or is refused, and where it opens
// every view lies inside its file (read here; ASan and the kernel would object).
TEST(Corruption, NoFlippedHeaderByteGetsPastTheChecks) {
  const MicroCheckpoint m([](SynthOptions* o) { o->config.num_experts = 2; });
  m.merge_into_single_file();
  const std::string good = testing::read_file(m.path("model.safetensors"));
  uint64_t length = 0;
  std::memcpy(&length, good.data(), 8);
  int accepted = 0;
  for (size_t at = 0; at < 8 + length; at += at < 16 ? 1 : 397) {
    std::string bad = good;
    bad[at] = static_cast<char>(bad[at] ^ 0x01);
    testing::write_file(m.path("model.safetensors"), bad);
    const auto r = Checkpoint::open(m.dir(), m.config(), {});
    if (!r.ok()) {
      EXPECT_EQ(r.status().code(), ErrorCode::kCheckpoint);
      continue;
    }
    ++accepted;
    EXPECT_TRUE((*r)->warm().ok());
  }
  EXPECT_EQ(accepted, 0);
}

}  // namespace
}  // namespace k3
