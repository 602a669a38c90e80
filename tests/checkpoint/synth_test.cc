#include "checkpoint/synth.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "checkpoint/checkpoint.h"
#include "checkpoint_fixture.h"

namespace k3 {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using testing::MicroCheckpoint;
using testing::TempDir;

TensorSpec spec_named(const ModelConfig& config, const std::string& name) {
  for (const TensorSpec& spec : build_manifest(config)) {
    if (spec.name == name) return spec;
  }
  ADD_FAILURE() << "no tensor " << name;
  return {};
}

std::string fill_whole(const ModelConfig& config, const TensorSpec& spec, uint64_t seed = 1) {
  std::string out(static_cast<size_t>(spec.bytes), '\xee');
  synth_fill(synth_tensor(config, spec, seed), 0, spec.bytes,
             reinterpret_cast<std::byte*>(out.data()));
  return out;
}

struct Moments {
  double mean = 0, deviation = 0, lo = 1e30, hi = -1e30;
};
Moments moments(const std::vector<float>& values) {
  Moments m;
  for (const float v : values) {
    m.mean += v;
    m.lo = std::min<double>(m.lo, v);
    m.hi = std::max<double>(m.hi, v);
  }
  m.mean /= static_cast<double>(values.size());
  for (const float v : values) m.deviation += (v - m.mean) * (v - m.mean);
  m.deviation = std::sqrt(m.deviation / static_cast<double>(values.size()));
  return m;
}
std::vector<float> values_of(const ModelConfig& config, const std::string& name) {
  const TensorSpec spec = spec_named(config, name);
  const std::string bytes = fill_whole(config, spec);
  std::vector<float> out;
  for (size_t i = 0; i < bytes.size(); i += dtype_bytes(spec.dtype)) {
    if (spec.dtype == DType::kBF16) {
      uint16_t bits;
      std::memcpy(&bits, bytes.data() + i, 2);
      out.push_back(bf16_to_f32(bits));
    } else {
      float value;
      std::memcpy(&value, bytes.data() + i, 4);
      out.push_back(value);
    }
  }
  return out;
}

// The bytes that any device must reproduce. A change here is a change of every synthetic model.
TEST(SynthValues, TheGeneratorIsFrozen) {
  const uint64_t key = synth_key(1, "lm_head.weight");
  EXPECT_EQ(synth_mix(0x9e3779b97f4a7c15ull), 0xe220a8397b1dcdafull);  // SplitMix64 from 0
  SynthTensor t;
  t.key = key;
  t.live = 8;
  t.half_width = 1.0f;
  EXPECT_EQ(key, 0xdb495aa1961bdb24ull);
  EXPECT_EQ(f32_bits(synth_float(t, 5)), 0xbe0e1400u);
  EXPECT_EQ(synth_float(t, 8), 0.0f);
}

TEST(SynthValues, UnitsAreSymmetricAndInsideOne) {
  EXPECT_EQ(synth_unit(0), -65535.0f / 65536);
  EXPECT_EQ(synth_unit(65535), 65535.0f / 65536);
  EXPECT_EQ(synth_unit(32768), 1.0f / 65536);
  EXPECT_EQ(synth_unit(32767), -1.0f / 65536);
}

// The fast loop against the one-element functions, over every kind and odd piece boundaries.
TEST(SynthFill, EqualsTheElementFunctionsWhateverThePieces) {
  const ModelConfig config = testing::micro_config();
  for (const TensorSpec& spec : build_manifest(config)) {
    if (spec.layer > 3 || spec.expert > 1) continue;
    const SynthTensor t = synth_tensor(config, spec, 7);
    const std::string whole = fill_whole(config, spec, 7);
    std::string expected;
    const int64_t count = spec.bytes / static_cast<int64_t>(dtype_bytes(spec.dtype));
    for (int64_t i = 0; i < count; ++i) {
      char element[4];
      if (spec.dtype == DType::kU8) {
        element[0] = static_cast<char>(synth_byte(t, i));
      } else if (spec.dtype == DType::kBF16) {
        const uint16_t bits = f32_to_bf16(synth_float(t, i));
        std::memcpy(element, &bits, 2);
      } else {
        const float value = synth_float(t, i);
        std::memcpy(element, &value, 4);
      }
      expected.append(element, dtype_bytes(spec.dtype));
    }
    ASSERT_EQ(whole, expected) << spec.name;
    std::string pieces(whole.size(), '\0');
    for (int64_t first = 0; first < spec.bytes; first += 24) {
      synth_fill(t, first, std::min<int64_t>(24, spec.bytes - first),
                 reinterpret_cast<std::byte*>(pieces.data()) + first);
    }
    ASSERT_EQ(pieces, whole) << spec.name;
  }
}

TEST(SynthFill, SeedAndNameBothMatter) {
  const ModelConfig config = testing::micro_config();
  const TensorSpec k = spec_named(config, "model.layers.0.self_attn.k_proj.weight");
  const TensorSpec v = spec_named(config, "model.layers.0.self_attn.v_proj.weight");
  EXPECT_EQ(fill_whole(config, k, 1), fill_whole(config, k, 1));
  EXPECT_NE(fill_whole(config, k, 1), fill_whole(config, k, 2));
  EXPECT_NE(fill_whole(config, k, 1), fill_whole(config, v, 1));
}

TEST(SynthFill, ScalesKeepActivationsInRange) {
  const ModelConfig config = *synth_preset("1g", 4, 8);
  const std::string layer = "model.layers.1.";
  const Moments q = moments(values_of(config, layer + "self_attn.q_proj.weight"));
  EXPECT_NEAR(q.mean, 0, 1e-3);
  EXPECT_NEAR(q.deviation, 1 / std::sqrt(1024.0), 1e-3);
  const Moments head = moments(values_of(config, "lm_head.weight"));
  EXPECT_NEAR(head.deviation, 2 / std::sqrt(1024.0), 1e-3);
  const Moments conv = moments(values_of(config, layer + "self_attn.q_conv1d.weight"));
  EXPECT_NEAR(conv.deviation, 0.5, 0.02);
  const Moments norm = moments(values_of(config, layer + "input_layernorm.weight"));
  EXPECT_NEAR(norm.mean, 1, 0.02);
  EXPECT_NEAR(norm.deviation, 0.25 / std::sqrt(3.0), 0.02);
  const Moments res = moments(values_of(config, layer + "mlp_res_proj.weight"));
  EXPECT_NEAR(res.deviation, 1 / std::sqrt(1024.0), 2e-3);
  const Moments bias =
      moments(values_of(config, layer + "block_sparse_moe.gate.e_score_correction_bias"));
  EXPECT_GT(bias.deviation, 0);
  EXPECT_LE(bias.hi, 0.05);
}

TEST(SynthFill, DecayParametersHaveTheRangesOfTheRelease) {
  const ModelConfig config = *synth_preset("1g", 4, 8);
  const std::vector<float> a_log = values_of(config, "model.layers.0.self_attn.A_log");
  ASSERT_EQ(a_log.size(), 128u);
  for (size_t i = 0; i < 8; ++i) {
    EXPECT_NE(a_log[i], 0);
    EXPECT_GT(std::exp(a_log[i]), 0.47);
    EXPECT_LT(std::exp(a_log[i]), 11.8);
  }
  for (size_t i = 8; i < 128; ++i) EXPECT_EQ(a_log[i], 0) << i;
  const Moments dt = moments(values_of(config, "model.layers.0.self_attn.dt_bias"));
  EXPECT_NEAR(dt.mean, -4.5, 0.3);
  EXPECT_GE(dt.lo, -9.0);
  EXPECT_LE(dt.hi, 0.18);
}

TEST(SynthFill, DecodedExpertsHaveTheMeanSquareOfTheirFanIn) {
  for (const char* preset : {"tiny", "1g", "k3"}) {
    const ModelConfig config = *synth_preset(preset, 2, 16);
    std::map<std::string, TensorSpec> specs;
    for (const TensorSpec& spec : build_manifest(config)) specs[spec.name] = spec;
    const int64_t experts = config.hidden_size > 1024 ? 1 : 16;  // enough scales for a mean
    for (const char* which : {"w1", "w2"}) {
      double sum = 0, count = 0, fan_in = 0;
      for (int64_t e = 0; e < experts; ++e) {
        const std::string name =
            cat("model.layers.1.block_sparse_moe.experts.", e, ".", which, ".weight_");
        const std::string codes = fill_whole(config, specs.at(name + "packed"));
        const std::string scales = fill_whole(config, specs.at(name + "scale"));
        for (size_t i = 0; i < codes.size() * 2; ++i) {
          const auto byte = static_cast<unsigned char>(codes[i / 2]);
          const double w = kE2m1[i % 2 ? byte >> 4 : byte & 15] *
                           e8m0_to_f32(static_cast<uint8_t>(scales[i / 32]));
          sum += w * w;
        }
        count += static_cast<double>(codes.size() * 2);
        fan_in = static_cast<double>(specs.at(name + "packed").shape[1] * 2);
      }
      EXPECT_NEAR(sum / count * fan_in, 1.0, 0.05) << preset << " " << which;
    }
  }
}

TEST(SynthPreset, NamesAndOverridesAreHonoured) {
  EXPECT_EQ(synth_preset("huge").status().code(), ErrorCode::kInvalidArgument);
  EXPECT_THAT(synth_preset("huge").status().message(), HasSubstr("expected tiny, 1g or k3"));
  const ModelConfig k3 = *synth_preset("k3");
  EXPECT_EQ(k3.num_mla_layers(), 24);
  EXPECT_EQ(k3.layer_kinds[91], LayerKind::kMla);
  EXPECT_EQ(k3.layer_kinds[92], LayerKind::kMla);
  const ModelConfig cut = *synth_preset("k3", 14, 32);
  EXPECT_EQ(cut.num_hidden_layers, 14);
  EXPECT_EQ(cut.num_experts, 32);
  EXPECT_EQ(cut.layer_kinds[13], LayerKind::kMla);
  EXPECT_FALSE(synth_preset("k3", 0, 8).ok()) << "fewer experts than top_k";
  const double gib = static_cast<double>(synth_payload_bytes(*synth_preset("1g"))) / (1 << 30);
  EXPECT_GT(gib, 0.9);
  EXPECT_LT(gib, 1.1);
}

TEST(WriteSynthetic, TheTinyPresetOpensAndItsConfigReadsBack) {
  const TempDir dir;
  SynthOptions options;
  options.config = *synth_preset("tiny");
  options.max_shard_bytes = 8 << 20;
  int64_t last = 0;
  const Status s = write_synthetic(options, dir.str(), [&](int64_t done, int64_t total) {
    EXPECT_GE(done, last);
    EXPECT_EQ(total, synth_payload_bytes(options.config));
    last = done;
  });
  ASSERT_TRUE(s.ok()) << s.message();
  EXPECT_EQ(last, synth_payload_bytes(options.config));
  Result<ModelConfig> config = load_model_config(dir.str());
  ASSERT_TRUE(config.ok()) << config.status().message();
  config->ignored_keys.clear();
  EXPECT_EQ(*config, options.config);
  const auto c = Checkpoint::open(dir.str(), *config, {});
  ASSERT_TRUE(c.ok()) << c.status().message();
  EXPECT_TRUE((*c)->plan().notes.empty());
  EXPECT_EQ((*c)->total_bytes(), last);
  for (const auto& entry : fs::directory_iterator(dir.path())) {
    EXPECT_LE(fs::file_size(entry.path()), (8u << 20) + 200'000) << entry.path();
  }
}

TEST(WriteSynthetic, BytesDoNotDependOnThreadsShardsOrPrefix) {
  const MicroCheckpoint a;
  const MicroCheckpoint b([](SynthOptions* o) {
    o->num_threads = 3;
    o->max_shard_bytes = 10 << 10;
    o->language_model_prefix = false;
  });
  const auto x = a.open(), y = b.open();
  ASSERT_TRUE(x.ok() && y.ok());
  for (const TensorSpec& spec : build_manifest(a.config())) {
    const TensorView* p = (*x)->find(spec.name);
    const TensorView* q = (*y)->find(spec.name);
    ASSERT_TRUE(p && q) << spec.name;
    EXPECT_EQ(std::memcmp(p->data, q->data, static_cast<size_t>(p->bytes)), 0) << spec.name;
  }
}

TEST(WriteSynthetic, TensorsLargerThanAChunkAreWholeInTheFile) {
  const TempDir dir;
  SynthOptions options;
  options.config = testing::micro_config();
  options.config.vocab_size = 40'000;  // embedding and head of 5 MB each
  const Status s = write_synthetic(options, dir.str());
  ASSERT_TRUE(s.ok()) << s.message();
  const ModelConfig config = *load_model_config(dir.str());
  const auto c = Checkpoint::open(dir.str(), config, {});
  ASSERT_TRUE(c.ok()) << c.status().message();
  for (const char* name : {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"}) {
    const TensorView* view = (*c)->find(name);
    const std::string expected = fill_whole(config, spec_named(config, name));
    EXPECT_EQ(std::memcmp(view->data, expected.data(), expected.size()), 0) << name;
  }
}

TEST(WriteSynthetic, WritesATokenizerOf256BytesAndTheMarkup) {
  const MicroCheckpoint m;
  std::istringstream ranks(testing::read_file(m.path("tiktoken.model")));
  std::string base64;
  int rank = 0, count = 0;
  while (ranks >> base64 >> rank) EXPECT_EQ(rank, count++);
  EXPECT_EQ(count, 256);
  EXPECT_THAT(testing::read_file(m.path("tiktoken.model")),
              ::testing::AllOf(HasSubstr("QQ== 65\n"), HasSubstr("/w== 255\n")));
  const auto config = nlohmann::json::parse(testing::read_file(m.path("tokenizer_config.json")));
  const auto& added = config["added_tokens_decoder"];
  EXPECT_EQ(added["256"]["content"], "[BOS]");
  EXPECT_EQ(added["258"]["content"], "<|end_of_msg|>");
  EXPECT_EQ(added["261"]["content"], "<|sep|>");
  EXPECT_EQ(added["319"]["content"], "[PAD]");
  const ModelConfig read = *load_model_config(m.dir());
  EXPECT_EQ(read.bos_token_id, 256);
  EXPECT_THAT(read.eos_token_ids, ::testing::ElementsAre(258, 257));
}

TEST(WriteSynthetic, WhatCannotBeWrittenIsRefused) {
  const TempDir dir;
  SynthOptions options;
  options.config = testing::micro_config();
  options.config.vocab_size = 263;
  options.config.pad_token_id = -1;
  EXPECT_THAT(write_synthetic(options, dir.str()).message(),
              HasSubstr("vocab_size: found 263, expected at least 264"));
  options.config = testing::micro_config();
  options.max_shard_bytes = 0;
  EXPECT_THAT(write_synthetic(options, dir.str()).message(), HasSubstr("max_shard_bytes"));
  options.max_shard_bytes = 1 << 20;
  options.config.moe_intermediate_size = 33;
  EXPECT_THAT(write_synthetic(options, dir.str()).message(), HasSubstr("multiple of 32"));
  options.config = testing::micro_config();
  testing::write_file(dir.path() / "precious", "x");
  EXPECT_THAT(write_synthetic(options, dir.str()).message(), HasSubstr("is not empty"));
  EXPECT_EQ(testing::read_file(dir.path() / "precious"), "x");
  EXPECT_THAT(write_synthetic(options, "/proc/k3_cannot").message(),
              HasSubstr("cannot create the directory"));
}

TEST(WriteSynthetic, ADiskTooSmallIsToldBeforeAnythingIsWritten) {
  const TempDir dir;
  SynthOptions options;
  options.config = *synth_preset("k3");
  const fs::space_info space = fs::space(dir.path());
  if (space.available > static_cast<uintmax_t>(synth_payload_bytes(options.config))) {
    GTEST_SKIP() << "this disk would hold the whole release";
  }
  const Status s = write_synthetic(options, dir.str());
  EXPECT_EQ(s.code(), ErrorCode::kMemory);
  EXPECT_THAT(s.message(), HasSubstr("1559965606912 for the weights"));
  EXPECT_TRUE(fs::is_empty(dir.path()));
}

}  // namespace
}  // namespace k3
