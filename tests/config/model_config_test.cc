#include "config/model_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <sstream>

namespace k3 {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

std::string nano_dir() { return std::string(K3_SOURCE_DIR) + "/models/k3-nano"; }

json nano_json() {
  std::ifstream in(nano_dir() + "/config.json");
  std::stringstream text;
  text << in.rdbuf();
  return json::parse(text.str());
}

// The k3-nano config after an edit of its text config.
Result<ModelConfig> parse_edited(const std::function<void(json&)>& edit) {
  json root = nano_json();
  edit(root["text_config"]);
  return parse_model_config(root.dump(), "config.json");
}

std::string error_of(const std::function<void(json&)>& edit) {
  const Result<ModelConfig> r = parse_edited(edit);
  if (r.ok()) return "(accepted)";
  EXPECT_EQ(r.status().code(), ErrorCode::kCheckpoint);
  return r.status().message();
}

class TempDir {
 public:
  TempDir() {
    std::string pattern = (fs::temp_directory_path() / "k3_config_XXXXXX").string();
    path_ = ::mkdtemp(pattern.data());
  }
  ~TempDir() { fs::remove_all(path_); }
  void write(const std::string& name, const std::string& text) const {
    std::ofstream(path_ / name, std::ios::binary) << text;
  }
  std::string str() const { return path_.string(); }

 private:
  fs::path path_;
};

TEST(ModelConfig, ReadsEveryDimensionOfK3Nano) {
  const Result<ModelConfig> r = load_model_config(nano_dir());
  ASSERT_TRUE(r.ok()) << r.status().message();
  EXPECT_EQ(r->hidden_size, 256);
  EXPECT_EQ(r->vocab_size, 2048);
  EXPECT_EQ(r->num_hidden_layers, 13);
  EXPECT_EQ(r->num_checkpoint_layers, 13);
  EXPECT_EQ(r->intermediate_size, 512);
  EXPECT_EQ(r->first_k_dense_replace, 1);
  EXPECT_EQ(r->max_position_embeddings, 8192);
  EXPECT_EQ(r->attn_res_block_size, 4);
  EXPECT_EQ(r->num_snapshots(), 4);
  EXPECT_EQ(r->num_attention_heads, 2);
  EXPECT_EQ(r->q_lora_rank, 192);
  EXPECT_EQ(r->kv_lora_rank, 512);
  EXPECT_EQ(r->qk_head_dim(), 192);
  EXPECT_EQ(r->mla_latent_dim(), 576);
  EXPECT_EQ(r->mla_v_dim(), 256);
  EXPECT_EQ(r->kda_num_heads, 2);
  EXPECT_EQ(r->kda_dim(), 256);
  EXPECT_EQ(r->short_conv_kernel_size, 4);
  EXPECT_EQ(r->gate_lower_bound, -5.0f);
  EXPECT_EQ(r->num_experts, 32);
  EXPECT_EQ(r->num_experts_per_token, 4);
  EXPECT_EQ(r->shared_intermediate_size(), 256);
  EXPECT_EQ(r->moe_intermediate_size, 128);
  EXPECT_EQ(r->routed_expert_hidden_size, 128);
  EXPECT_EQ(r->routed_scaling_factor, 1.0f);
  EXPECT_EQ(r->situ_beta, 4.0f);
  EXPECT_EQ(r->situ_linear_beta, 25.0f);
  EXPECT_EQ(r->rms_norm_eps, 1e-5f);
  EXPECT_EQ(r->num_mla_layers(), 4);
  EXPECT_EQ(r->num_kda_layers(), 9);
  for (const int64_t layer : {3, 7, 11, 12}) {
    EXPECT_EQ(r->layer_kinds[static_cast<size_t>(layer)], LayerKind::kMla) << layer;
  }
  EXPECT_EQ(r->bos_token_id, 1792);
  EXPECT_EQ(r->pad_token_id, 2047);
}

TEST(ModelConfig, EosIdsOfGenerationConfigJoinThoseOfConfig) {
  const Result<ModelConfig> r = load_model_config(nano_dir());
  ASSERT_TRUE(r.ok()) << r.status().message();
  EXPECT_THAT(r->eos_token_ids, ElementsAre(1794, 1793));
}

TEST(ModelConfig, ReadsTheOracleConfigs) {
  for (const char* name : {"tiny_k3", "tiny128_k3_calm"}) {
    const Result<ModelConfig> r = load_model_config(std::string(K3_BINARY_DIR) + "/oracle/" + name);
    ASSERT_TRUE(r.ok()) << r.status().message();
    EXPECT_EQ(r->num_hidden_layers, 9);
    EXPECT_EQ(r->num_mla_layers(), 3);
    EXPECT_THAT(r->eos_token_ids, ElementsAre(2));
  }
}

TEST(ModelConfig, FlatAndNestedConfigsParseToTheSame) {
  const json root = nano_json();
  Result<ModelConfig> nested = parse_model_config(root.dump(), "nested");
  ASSERT_TRUE(nested.ok()) << nested.status().message();
  json text = root["text_config"];
  for (const char* model_type : {"kimi_linear", "kimi_k3"}) {
    text["model_type"] = model_type;
    Result<ModelConfig> flat = parse_model_config(text.dump(), "flat");
    ASSERT_TRUE(flat.ok()) << flat.status().message();
    // The wrapper's own keys are the only difference.
    std::erase_if(nested->ignored_keys, [](const std::string& k) { return k.starts_with("/"); });
    EXPECT_EQ(*nested, *flat);
  }
}

TEST(ModelConfig, WritesJsonThatReadsBackTheSame) {
  Result<ModelConfig> r = load_model_config(nano_dir());
  ASSERT_TRUE(r.ok());
  Result<ModelConfig> back = parse_model_config(model_config_to_json(*r), "written");
  ASSERT_TRUE(back.ok()) << back.status().message();
  r->ignored_keys.clear();
  back->ignored_keys.clear();
  EXPECT_EQ(*r, *back);
  EXPECT_THAT(model_config_to_json(*r), HasSubstr("\"rms_norm_eps\": 1e-05"));
}

TEST(ModelConfig, ExtraKeysAreReportedNotFatal) {
  json root = nano_json();
  root["vision_config"] = {{"hidden_size", 1024}};  // every release has one: nothing to report
  root["novelty"] = true;
  root["text_config"]["brand_new"] = 7;
  root["text_config"]["linear_attn_config"]["note"] = "x";
  root["text_config"]["quantization_config"]["version"] = "0.1";
  root["text_config"]["quantization_config"]["config_groups"]["group_0"]["weights"]["zp"] = nullptr;
  const Result<ModelConfig> r = parse_model_config(root.dump(), "config.json");
  ASSERT_TRUE(r.ok()) << r.status().message();
  for (const char* key :
       {"/novelty", "brand_new", "linear_attn_config.note", "quantization_config.version",
        "quantization_config.config_groups.group_0.weights.zp"}) {
    EXPECT_THAT(r->ignored_keys, Contains(key));
  }
  for (const char* key : {"hidden_size", "rope_theta", "/vision_config", "/architectures"}) {
    EXPECT_THAT(r->ignored_keys, Not(Contains(key)));
  }
}

TEST(ModelConfig, QuantizationConfigIsFoundInTheWrapperToo) {
  json root = nano_json();
  root["quantization_config"] = root["text_config"]["quantization_config"];
  root["text_config"].erase("quantization_config");
  EXPECT_TRUE(parse_model_config(root.dump(), "c").ok());
  root["quantization_config"]["format"] = "fp8";
  EXPECT_THAT(parse_model_config(root.dump(), "c").status().message(),
              HasSubstr("quantization_config.format: found \"fp8\""));
}

TEST(ModelConfig, EveryKeyThatChangesTheMathematicsIsRefusedByName) {
  struct Case {
    const char* key;
    json value;
    const char* expected;
  };
  const Case cases[] = {
      {"hidden_act", "silu", "\"situ\""},
      {"mla_use_nope", false, "true"},
      {"mla_use_output_gate", false, "true"},
      {"moe_renormalize", false, "true"},
      {"moe_router_activation_func", "softmax", "\"sigmoid\""},
      {"latent_moe_use_norm", false, "true"},
      {"topk_method", "greedy", "\"noaux_tc\""},
      {"num_expert_group", 8, "1"},
      {"topk_group", 4, "1"},
      {"moe_layer_freq", 2, "1"},
      {"num_nextn_predict_layers", 1, "0"},
      {"tie_word_embeddings", true, "false"},
      {"dtype", "float16", "\"bfloat16\""},
      {"torch_dtype", "float32", "\"bfloat16\""},
      {"num_key_value_heads", 1, "2"},
      {"rope_scaling", json{{"type", "yarn"}}, "null"},
      {"sliding_window", 4096, "null"},
      {"attention_bias", true, "false"},
      {"mlp_bias", true, "false"},
      {"final_logit_softcapping", 30.0, "null"},
      {"attn_logit_softcapping", 50.0, "null"},
      {"head_dim", 96, "128"},
      {"model_type", "qwen3", "\"kimi_linear\""},
  };
  for (const Case& c : cases) {
    EXPECT_THAT(error_of([&](json& t) { t[c.key] = c.value; }),
                AllOf(HasSubstr(std::string("text_config.") + c.key + ": found "),
                      HasSubstr(c.value.dump()), HasSubstr(std::string("expected ") + c.expected)))
        << c.key;
  }
  EXPECT_THAT(error_of([](json& t) { t["linear_attn_config"]["use_full_rank_gate"] = false; }),
              HasSubstr("text_config.linear_attn_config.use_full_rank_gate: found false"));
}

TEST(ModelConfig, EveryQuantizationKeyIsRefusedByName) {
  struct Case {
    const char* pointer;
    json value;
    const char* message;
  };
  const Case cases[] = {
      {"/quant_method", "fp8", "quant_method: found \"fp8\""},
      {"/format", "nvfp4-pack-quantized", "format: found"},
      {"/quantization_status", "frozen", "quantization_status: found"},
      {"/kv_cache_scheme", json{{"num_bits", 8}}, "kv_cache_scheme: found"},
      {"/config_groups/group_1", json::object(), "config_groups: found"},
      {"/config_groups/group_0/input_activations", json{{"num_bits", 8}},
       "config_groups.group_0.input_activations: found"},
      {"/config_groups/group_0/weights/num_bits", 8, "weights.num_bits: found 8, expected 4"},
      {"/config_groups/group_0/weights/type", "int", "weights.type: found \"int\""},
      {"/config_groups/group_0/weights/strategy", "channel", "weights.strategy: found"},
      {"/config_groups/group_0/weights/group_size", 16, "weights.group_size: found 16"},
      {"/config_groups/group_0/weights/symmetric", false, "weights.symmetric: found false"},
      {"/config_groups/group_0/weights/dynamic", true, "weights.dynamic: found true"},
      {"/config_groups/group_0/weights/scale_dtype", "torch.float8_e4m3fn",
       "weights.scale_dtype: found"},
      {"/config_groups/group_0/weights", nullptr, "weights: found null, expected an object"},
      {"/config_groups", json::array(), "config_groups: found [], expected an object"},
  };
  for (const Case& c : cases) {
    EXPECT_THAT(error_of([&](json& t) {
                  t["quantization_config"][json::json_pointer(c.pointer)] = c.value;
                }),
                HasSubstr(c.message));
  }
}

TEST(ModelConfig, MissingKeysAreNamedAllAtOnce) {
  EXPECT_THAT(error_of([](json& t) {
                t.erase("hidden_size");
                t.erase("attn_res_block_size");
                t["linear_attn_config"].erase("gate_lower_bound");
                t["quantization_config"].erase("format");
              }),
              AllOf(HasSubstr("missing "), HasSubstr("text_config.hidden_size"),
                    HasSubstr("text_config.attn_res_block_size"),
                    HasSubstr("text_config.linear_attn_config.gate_lower_bound"),
                    HasSubstr("text_config.quantization_config.format")));
}

// Whatever key is taken away: either it is named as missing or its absence has one safe meaning.
TEST(ModelConfig, EachKeyOfTheTextConfigIsEitherRequiredOrHarmless) {
  const Result<ModelConfig> whole = parse_edited([](json&) {});
  ASSERT_TRUE(whole.ok()) << whole.status().message();
  const json text = nano_json()["text_config"];
  int required = 0;
  for (const auto& item : text.items()) {
    Result<ModelConfig> r = parse_edited([&](json& t) { t.erase(item.key()); });
    if (!r.ok()) {
      EXPECT_THAT(r.status().message(), HasSubstr("missing text_config." + item.key()));
      ++required;
      continue;
    }
    ModelConfig expected = *whole;
    r->ignored_keys.clear();
    expected.ignored_keys.clear();
    EXPECT_EQ(*r, expected) << item.key();
  }
  EXPECT_EQ(required, 31);
}

TEST(ModelConfig, WrongJsonTypesAreNamed) {
  EXPECT_THAT(error_of([](json& t) { t["hidden_size"] = "256"; }),
              HasSubstr("text_config.hidden_size: found \"256\", expected an integer"));
  EXPECT_THAT(error_of([](json& t) { t["hidden_size"] = 256.0; }),
              HasSubstr("hidden_size: found 256.0, expected an integer"));
  EXPECT_THAT(error_of([](json& t) { t["hidden_size"] = true; }), HasSubstr("found true"));
  EXPECT_THAT(error_of([](json& t) { t["hidden_size"] = nullptr; }), HasSubstr("found null"));
  EXPECT_THAT(error_of([](json& t) { t["hidden_size"] = 18446744073709551615ull; }),
              HasSubstr("found 18446744073709551615"));
  EXPECT_THAT(error_of([](json& t) { t["rms_norm_eps"] = "1e-5"; }),
              HasSubstr("rms_norm_eps: found \"1e-5\", expected a number"));
  EXPECT_THAT(error_of([](json& t) { t["rms_norm_eps"] = 1e300; }), HasSubstr("finite"));
  EXPECT_THAT(error_of([](json& t) { t["mla_use_nope"] = 1; }), HasSubstr("mla_use_nope: found 1"));
  EXPECT_THAT(error_of([](json& t) { t["topk_group"] = 1.0; }), HasSubstr("topk_group: found 1.0"));
  EXPECT_THAT(error_of([](json& t) { t["linear_attn_config"] = 3; }),
              HasSubstr("linear_attn_config: found 3, expected an object"));
  EXPECT_THAT(error_of([](json& t) { t["linear_attn_config"]["kda_layers"] = "all"; }),
              HasSubstr("kda_layers: found \"all\", expected a list of integers"));
  EXPECT_THAT(error_of([](json& t) { t["linear_attn_config"]["kda_layers"][0] = 1.5; }),
              HasSubstr("expected a list of integers"));
}

TEST(ModelConfig, DimensionsOutsideTheirBoundsAreRefused) {
  for (const char* key :
       {"hidden_size", "vocab_size", "num_hidden_layers", "intermediate_size",
        "max_position_embeddings", "attn_res_block_size", "q_lora_rank", "kv_lora_rank",
        "qk_nope_head_dim", "qk_rope_head_dim", "num_experts", "num_experts_per_token",
        "num_shared_experts", "moe_intermediate_size", "routed_expert_hidden_size"}) {
    for (const int64_t value : {int64_t{0}, int64_t{-1}, INT64_MAX, INT64_MIN, int64_t{1} << 40}) {
      EXPECT_THAT(error_of([&](json& t) {
                    t[key] = value;
                    t.erase("head_dim");
                  }),
                  AllOf(HasSubstr(std::string(key) + ": found " + std::to_string(value)),
                        HasSubstr("expected ")))
          << key;
    }
  }
  for (const char* key : {"num_heads", "head_dim", "short_conv_kernel_size"}) {
    EXPECT_THAT(error_of([&](json& t) { t["linear_attn_config"][key] = 0; }),
                HasSubstr(std::string("linear_attn_config.") + key + ": found 0"));
  }
  EXPECT_THAT(error_of([](json& t) {
                t["num_attention_heads"] = 0;
                t["num_key_value_heads"] = 0;
              }),
              HasSubstr("num_attention_heads: found 0"));
  EXPECT_THAT(error_of([](json& t) { t["first_k_dense_replace"] = -1; }),
              HasSubstr("first_k_dense_replace: found -1"));
  EXPECT_THAT(error_of([](json& t) {
                t["num_experts"] = 1 << 14;
                t["num_hidden_layers"] = 1024;
                json kda = json::array();
                for (int i = 1; i <= 1024; ++i) kda.push_back(i);
                t["linear_attn_config"]["kda_layers"] = kda;
                t["linear_attn_config"]["full_attn_layers"] = json::array();
              }),
              HasSubstr("num_hidden_layers * num_experts: found 16777216"));
}

TEST(ModelConfig, ValuesThatMustFitTogetherAreCompared) {
  EXPECT_THAT(error_of([](json& t) { t["routed_expert_hidden_size"] = 120; }),
              HasSubstr("routed_expert_hidden_size: found 120, expected a multiple of 32"));
  EXPECT_THAT(error_of([](json& t) { t["moe_intermediate_size"] = 100; }),
              HasSubstr("moe_intermediate_size: found 100, expected a multiple of 32"));
  EXPECT_THAT(error_of([](json& t) { t["num_experts_per_token"] = 33; }),
              HasSubstr("num_experts_per_token: found 33, expected at most num_experts = 32"));
}

TEST(ModelConfig, RealNumbersOutsideTheirRangeAreRefused) {
  for (const double bound : {-8.0, 0.0, 1.0}) {
    EXPECT_THAT(error_of([&](json& t) { t["linear_attn_config"]["gate_lower_bound"] = bound; }),
                HasSubstr("gate_lower_bound: found "));
  }
  for (const char* key : {"activation_situ_beta", "activation_situ_linear_beta", "rms_norm_eps",
                          "routed_scaling_factor"}) {
    for (const double value : {0.0, -1.0, 1e9}) {
      EXPECT_THAT(error_of([&](json& t) { t[key] = value; }),
                  HasSubstr(std::string(key) + ": found "));
    }
  }
}

TEST(ModelConfig, LayerListsCountFromOneAndCoverEveryLayerOnce) {
  const auto lists = [](json full, json kda) {
    return [=](json& t) {
      t["linear_attn_config"]["full_attn_layers"] = full;
      t["linear_attn_config"]["kda_layers"] = kda;
    };
  };
  EXPECT_THAT(error_of(lists({3, 7, 11, 12}, {0, 1, 2, 4, 5, 6, 8, 9, 10})),
              HasSubstr("kda_layers: found layer 0, expected 1 to 13"));
  EXPECT_THAT(error_of(lists({4, 8, 12, 14}, {1, 2, 3, 5, 6, 7, 9, 10, 11, 13})),
              HasSubstr("full_attn_layers: found layer 14, expected 1 to 13"));
  EXPECT_THAT(error_of(lists({4, 8, 12, 13}, {1, 2, 3, 4, 5, 6, 7, 9, 10, 11})),
              HasSubstr("kda_layers: layer 4 is listed twice"));
  EXPECT_THAT(error_of(lists({4, 8, 12}, {1, 2, 3, 5, 6, 7, 9, 10, 11})),
              HasSubstr("layer 13 of 13 (counted from one) is in neither list"));
}

TEST(ModelConfig, EosMayBeAnIntegerAListOrNullInEitherPlace) {
  const auto eos = [](json outer, json inner) {
    json root = nano_json();
    root["eos_token_id"] = outer;
    root["text_config"]["eos_token_id"] = inner;
    const Result<ModelConfig> r = parse_model_config(root.dump(), "c");
    EXPECT_TRUE(r.ok()) << r.status().message();
    return r.ok() ? r->eos_token_ids : std::vector<int64_t>{};
  };
  EXPECT_THAT(eos(1794, 1794), ElementsAre(1794));
  EXPECT_THAT(eos(nullptr, 1794), ElementsAre(1794));
  EXPECT_THAT(eos(nullptr, json{1794, 1793}), ElementsAre(1794, 1793));
  EXPECT_THAT(eos(json{1793}, json{1794, 1793}), ElementsAre(1793, 1794));
  EXPECT_THAT(eos(nullptr, nullptr), IsEmpty());
  EXPECT_THAT(error_of([](json& t) { t["eos_token_id"] = "<|end|>"; }),
              HasSubstr("eos_token_id: found \"<|end|>\""));
  EXPECT_THAT(error_of([](json& t) { t["eos_token_id"] = {1, "a"}; }), HasSubstr("eos_token_id"));
}

TEST(ModelConfig, TokenIdsOutsideTheVocabularyAreRefused) {
  EXPECT_THAT(error_of([](json& t) {
                t["eos_token_id"] = {1794, 2048};
              }),
              HasSubstr("eos_token_id: found 2048"));
  EXPECT_THAT(error_of([](json& t) { t["eos_token_id"] = -1; }), HasSubstr("found -1"));
  json root = nano_json();
  root["pad_token_id"] = 163839;
  EXPECT_THAT(parse_model_config(root.dump(), "c").status().message(),
              HasSubstr("pad_token_id: found 163839, expected 0 to vocab_size - 1 = 2047"));
}

TEST(ModelConfig, GenerationConfigIsCheckedToo) {
  const TempDir dir;
  dir.write("config.json", nano_json().dump());
  ASSERT_TRUE(load_model_config(dir.str()).ok());
  for (const auto& [text, message] :
       {std::pair{"{\"eos_token_id\": 5000}", "eos_token_id: found 5000"},
        std::pair{"{\"eos_token_id\": \"x\"}", "eos_token_id: found \"x\""},
        std::pair{"[]", "expected a JSON object"}, std::pair{"{", "not JSON"}}) {
    dir.write("generation_config.json", text);
    EXPECT_THAT(load_model_config(dir.str()).status().message(),
                AllOf(HasSubstr("generation_config.json"), HasSubstr(message)));
  }
  dir.write("generation_config.json", "{\"eos_token_id\": null, \"temperature\": 1.0}");
  EXPECT_TRUE(load_model_config(dir.str()).ok());
}

TEST(ModelConfig, WhatIsNoConfigAtAllIsRefused) {
  EXPECT_THAT(load_model_config("/nonexistent/k3").status().message(),
              HasSubstr("/nonexistent/k3: no such model directory"));
  const TempDir dir;
  EXPECT_THAT(load_model_config(dir.str()).status().message(),
              HasSubstr("config.json: no such file"));
  dir.write("config.json", "");
  EXPECT_THAT(load_model_config(dir.str()).status().message(), HasSubstr("the file is empty"));
  dir.write("config.json", "version https://git-lfs.github.com/spec/v1\noid sha256:0\n");
  EXPECT_THAT(load_model_config(dir.str()).status().message(), HasSubstr("Git LFS pointer"));
  EXPECT_THAT(parse_model_config("[1]", "c").status().message(),
              HasSubstr("expected a JSON object"));
  EXPECT_THAT(parse_model_config("{\"text_config\": 5}", "c").status().message(),
              HasSubstr("text_config: found 5, expected an object"));
  EXPECT_THAT(parse_model_config("{}", "c").status().message(), HasSubstr("missing "));
}

TEST(TruncateLayers, KeepsTheFirstLayersAndRemembersTheCheckpoint) {
  const Result<ModelConfig> whole = load_model_config(nano_dir());
  ASSERT_TRUE(whole.ok());
  const Result<ModelConfig> cut = truncate_layers(*whole, 5);
  ASSERT_TRUE(cut.ok());
  EXPECT_EQ(cut->num_hidden_layers, 5);
  EXPECT_EQ(cut->num_checkpoint_layers, 13);
  EXPECT_EQ(cut->num_snapshots(), 2);
  EXPECT_THAT(cut->layer_kinds, ElementsAre(LayerKind::kKda, LayerKind::kKda, LayerKind::kKda,
                                            LayerKind::kMla, LayerKind::kKda));
  EXPECT_TRUE(validate_model_config(*cut, "cut").ok());
  EXPECT_EQ(*truncate_layers(*whole, 13), *whole);
  for (const int64_t n : {0, -1, 14}) {
    const Status s = truncate_layers(*whole, n).status();
    EXPECT_EQ(s.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(s.message(), HasSubstr("expected 1 to 13"));
  }
}

}  // namespace
}  // namespace k3
