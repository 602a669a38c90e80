#include "config/model_config.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <span>
#include <utility>

#include "core/strict_json.h"

namespace k3 {
namespace {

using nlohmann::json;

constexpr int64_t kMaxConfigBytes = int64_t{16} << 20;

// Reads one JSON object: every key asked for is checked and remembered, what nobody asked for can
// be listed afterwards. The first wrong value is kept; missing keys are collected, so that one
// message names them all.
class ObjectReader {
 public:
  // `object` must outlive the reader. `path` precedes each key in messages: "text_config.".
  ObjectReader(const json& object, std::string path) : object_(object), path_(std::move(path)) {}

  // nullptr where absent; a null value is present.
  const json* find(const char* key) {
    seen_.insert(key);
    const auto it = object_.find(key);
    return it == object_.end() ? nullptr : &*it;
  }

  int64_t required_int(const char* key) {
    const json* value = require(key);
    int64_t out = 0;
    if (value && !to_int(*value, &out)) wrong(key, *value, "an integer");
    return out;
  }
  float required_float(const char* key) {
    const json* value = require(key);
    if (!value) return 0;
    if (!value->is_number()) {
      wrong(key, *value, "a number");
      return 0;
    }
    const double wide = value->get<double>();
    const float out = static_cast<float>(wide);
    if (!std::isfinite(out)) wrong(key, *value, "a finite float32");
    return out;
  }
  const json* required_object(const char* key) {
    const json* value = require(key);
    if (value && !value->is_object()) {
      wrong(key, *value, "an object");
      return nullptr;
    }
    return value;
  }

  // The key must be there and be `expected`: this program computes nothing else.
  void required_value(const char* key, const json& expected) {
    if (const json* value = require(key)) compare(key, *value, {&expected, 1});
  }
  // The same where an absent key (or null) means `expected[0]`.
  void optional_value(const char* key, std::initializer_list<json> expected) {
    const json* value = find(key);
    if (value && !value->is_null()) compare(key, *value, {expected.begin(), expected.size()});
  }
  void optional_null(const char* key) {
    const json* value = find(key);
    if (value && !value->is_null()) wrong(key, *value, "null");
  }

  std::optional<int64_t> optional_int(const char* key) {
    const json* value = find(key);
    if (!value || value->is_null()) return std::nullopt;
    int64_t out = 0;
    if (!to_int(*value, &out)) {
      wrong(key, *value, "an integer or null");
      return std::nullopt;
    }
    return out;
  }
  // An integer, a list of integers or null.
  std::vector<int64_t> optional_ids(const char* key) {
    const json* value = find(key);
    if (!value || value->is_null()) return {};
    return int_list(key, *value, value->is_array());
  }
  std::vector<int64_t> required_int_list(const char* key) {
    const json* value = require(key);
    return value ? int_list(key, *value, true) : std::vector<int64_t>{};
  }

  void wrong(const char* key, const json& value, const std::string& expected) {
    if (error_.empty()) {
      error_ = cat(path_, key, ": found ", describe_json(value), ", expected ", expected);
    }
  }

  const std::string& path() const { return path_; }
  const std::string& error() const { return error_; }
  const std::vector<std::string>& missing() const { return missing_; }
  void take_problems_of(const ObjectReader& inner) {
    if (error_.empty()) error_ = inner.error_;
    missing_.insert(missing_.end(), inner.missing_.begin(), inner.missing_.end());
  }
  // Keys nobody asked for, each behind `prefix`.
  void append_ignored(const std::string& prefix, std::vector<std::string>* out) const {
    for (const auto& item : object_.items()) {
      if (!seen_.contains(item.key())) out->push_back(prefix + item.key());
    }
  }

 private:
  const json* require(const char* key) {
    const json* value = find(key);
    if (!value) missing_.push_back(path_ + key);
    return value;
  }
  static bool to_int(const json& value, int64_t* out) {
    if (value.is_number_unsigned()) {
      const uint64_t wide = value.get<uint64_t>();
      if (wide > static_cast<uint64_t>(INT64_MAX)) return false;
      *out = static_cast<int64_t>(wide);
      return true;
    }
    if (!value.is_number_integer()) return false;  // floats and booleans are no integers here
    *out = value.get<int64_t>();
    return true;
  }
  std::vector<int64_t> int_list(const char* key, const json& value, bool is_list) {
    std::vector<int64_t> out;
    const json wrapped = is_list ? value : json::array({value});
    if (!wrapped.is_array()) {
      wrong(key, value, "a list of integers");
      return out;
    }
    for (const json& item : wrapped) {
      int64_t id = 0;
      if (!to_int(item, &id)) {
        wrong(key, value,
              is_list ? "a list of integers" : "an integer, a list of integers or null");
        return {};
      }
      out.push_back(id);
    }
    return out;
  }
  void compare(const char* key, const json& value, std::span<const json> expected) {
    for (const json& e : expected) {
      // nlohmann compares 1 == 1.0; true == 1 is false there, as it should be.
      if (value == e && (value.is_number_float() == e.is_number_float())) return;
    }
    std::string text;
    for (const json& e : expected) text += (text.empty() ? "" : " or ") + describe_json(e);
    wrong(key, value, text);
  }

  const json& object_;
  const std::string path_;
  std::set<std::string, std::less<>> seen_;
  std::string error_;
  std::vector<std::string> missing_;
};

// MXFP4 as compressed-tensors writes it, weights only. `ignore` and `targets` are not interpreted:
// the manifest says which tensors are packed and the checkpoint must agree exactly.
void read_quantization(ObjectReader* parent, const json& object, const std::string& ignored_prefix,
                       std::vector<std::string>* ignored) {
  ObjectReader quant(object, parent->path() + "quantization_config.");
  quant.required_value("quant_method", "compressed-tensors");
  quant.required_value("format", "mxfp4-pack-quantized");
  quant.optional_value("quantization_status", {"compressed"});
  quant.optional_null("kv_cache_scheme");
  if (const json* sparsity = quant.find("sparsity_config");
      sparsity && !sparsity->is_null() && *sparsity != json::object()) {
    quant.wrong("sparsity_config", *sparsity, "null or {}");
  }
  quant.find("ignore");
  if (const json* groups = quant.required_object("config_groups")) {
    if (groups->size() != 1) {
      quant.wrong("config_groups", *groups, "exactly one group");
    } else if (!groups->begin()->is_object()) {
      quant.wrong("config_groups", *groups, "one group that is an object");
    } else {
      const std::string name = cat("config_groups.", groups->begin().key(), ".");
      ObjectReader group(*groups->begin(), quant.path() + name);
      group.find("targets");
      group.optional_null("input_activations");
      group.optional_null("output_activations");
      group.optional_value("format", {"mxfp4-pack-quantized"});
      if (const json* object_weights = group.required_object("weights")) {
        ObjectReader weights(*object_weights, group.path() + "weights.");
        weights.required_value("num_bits", 4);
        weights.required_value("type", "float");
        weights.required_value("strategy", "group");
        weights.required_value("group_size", 32);
        weights.required_value("symmetric", true);
        weights.optional_value("dynamic", {false});
        weights.optional_value("scale_dtype", {"torch.uint8", "uint8"});
        weights.optional_null("actorder");
        weights.optional_null("block_structure");
        weights.find("observer");
        group.take_problems_of(weights);
        weights.append_ignored(ignored_prefix + name + "weights.", ignored);
      }
      quant.take_problems_of(group);
      group.append_ignored(ignored_prefix + name, ignored);
    }
  }
  quant.append_ignored(ignored_prefix, ignored);
  parent->take_problems_of(quant);
}

void append_new(const std::vector<int64_t>& ids, std::vector<int64_t>* out) {
  for (const int64_t id : ids) {
    if (std::find(out->begin(), out->end(), id) == out->end()) out->push_back(id);
  }
}

std::string describe_list(const std::vector<int64_t>& values) {
  return describe_json(json(values));
}

Status read_layer_kinds(const std::vector<int64_t>& full, const std::vector<int64_t>& kda,
                        const std::string& where, ModelConfig* config) {
  const int64_t n = config->num_hidden_layers;
  std::vector<int> count(static_cast<size_t>(n) + 1, 0);
  config->layer_kinds.assign(static_cast<size_t>(n), LayerKind::kKda);
  for (const bool is_full : {true, false}) {
    const char* name = is_full ? "full_attn_layers" : "kda_layers";
    for (const int64_t layer : is_full ? full : kda) {
      if (layer < 1 || layer > n) {
        return checkpoint_error(where, name, ": found layer ", layer, ", expected 1 to ", n,
                                " (the lists count from one)");
      }
      if (++count[static_cast<size_t>(layer)] > 1) {
        return checkpoint_error(where, name, ": layer ", layer,
                                " is listed twice, expected each layer once in full_attn_layers or "
                                "kda_layers");
      }
      if (is_full) config->layer_kinds[static_cast<size_t>(layer - 1)] = LayerKind::kMla;
    }
  }
  for (int64_t layer = 1; layer <= n; ++layer) {
    if (count[static_cast<size_t>(layer)] == 0) {
      return checkpoint_error(where, "full_attn_layers, kda_layers: layer ", layer, " of ", n,
                              " (counted from one) is in neither list");
    }
  }
  return {};
}

// What decides nothing in this program's arithmetic only as long as it has the value named here.
void check_constants(ObjectReader* text) {
  text->required_value("hidden_act", "situ");
  text->required_value("mla_use_nope", true);
  text->required_value("mla_use_output_gate", true);
  text->required_value("moe_renormalize", true);
  text->required_value("moe_router_activation_func", "sigmoid");
  text->required_value("latent_moe_use_norm", true);
  text->optional_value("topk_method", {"noaux_tc"});
  text->optional_value("num_expert_group", {1});
  text->optional_value("topk_group", {1});
  text->optional_value("moe_layer_freq", {1});
  text->optional_value("num_nextn_predict_layers", {0});
  text->optional_value("attention_bias", {false});
  text->optional_value("mlp_bias", {false});
  text->optional_null("rope_scaling");
  text->optional_null("sliding_window");
  text->optional_null("final_logit_softcapping");
  text->optional_null("attn_logit_softcapping");
}

// Keys every release carries that decide nothing here: K3 has no rotary embedding, grouping is
// inert with one group, and no Python of the checkpoint is ever run.
constexpr const char* kInertKeys[] = {"architectures",     "auto_map",
                                      "initializer_range", "media_placeholder_token_id",
                                      "rope_theta",        "transformers_version",
                                      "use_cache",         "use_grouped_topk",
                                      "vision_config"};

void check_wrapper_or_text(ObjectReader* reader) {
  for (const char* key : kInertKeys) reader->find(key);
  reader->optional_value("dtype", {"bfloat16"});
  reader->optional_value("torch_dtype", {"bfloat16"});
  reader->optional_value("tie_word_embeddings", {false});
}

}  // namespace

int64_t ModelConfig::num_kda_layers() const {
  return std::count(layer_kinds.begin(), layer_kinds.end(), LayerKind::kKda);
}
int64_t ModelConfig::num_mla_layers() const {
  return std::count(layer_kinds.begin(), layer_kinds.end(), LayerKind::kMla);
}

Result<ModelConfig> parse_model_config(std::string_view json_text, const std::string& origin) {
  K3_ASSIGN_OR_RETURN(const json root, parse_strict_json(json_text, origin));
  if (!root.is_object()) {
    return checkpoint_error(origin, ": found ", describe_json(root), ", expected a JSON object");
  }
  const bool wrapped = root.contains("text_config");
  if (wrapped && !root["text_config"].is_object()) {
    return checkpoint_error(origin, ": text_config: found ", describe_json(root["text_config"]),
                            ", expected an object");
  }
  ModelConfig c;
  ObjectReader wrapper(root, "");
  ObjectReader text(wrapped ? root["text_config"] : root, wrapped ? "text_config." : "");

  if (wrapped) {
    wrapper.find("text_config");
    wrapper.required_value("model_type", "kimi_k3");
    text.required_value("model_type", "kimi_linear");
    check_wrapper_or_text(&wrapper);
  } else if (!text.find("model_type")) {
    text.required_value("model_type", "kimi_linear");  // names it as missing
  } else {
    text.optional_value("model_type", {"kimi_linear", "kimi_k3"});
  }
  check_wrapper_or_text(&text);
  check_constants(&text);

  c.hidden_size = text.required_int("hidden_size");
  c.vocab_size = text.required_int("vocab_size");
  c.num_hidden_layers = text.required_int("num_hidden_layers");
  c.num_checkpoint_layers = c.num_hidden_layers;
  c.intermediate_size = text.required_int("intermediate_size");
  c.first_k_dense_replace = text.required_int("first_k_dense_replace");
  c.max_position_embeddings = text.required_int("max_position_embeddings");
  c.attn_res_block_size = text.required_int("attn_res_block_size");
  c.num_attention_heads = text.required_int("num_attention_heads");
  c.q_lora_rank = text.required_int("q_lora_rank");
  c.kv_lora_rank = text.required_int("kv_lora_rank");
  c.qk_nope_head_dim = text.required_int("qk_nope_head_dim");
  c.qk_rope_head_dim = text.required_int("qk_rope_head_dim");
  c.v_head_dim = text.required_int("v_head_dim");
  c.num_experts = text.required_int("num_experts");
  c.num_experts_per_token = text.required_int("num_experts_per_token");
  c.num_shared_experts = text.required_int("num_shared_experts");
  c.moe_intermediate_size = text.required_int("moe_intermediate_size");
  c.routed_expert_hidden_size = text.required_int("routed_expert_hidden_size");
  c.routed_scaling_factor = text.required_float("routed_scaling_factor");
  c.situ_beta = text.required_float("activation_situ_beta");
  c.situ_linear_beta = text.required_float("activation_situ_linear_beta");
  c.rms_norm_eps = text.required_float("rms_norm_eps");

  text.find("num_key_value_heads");
  text.find("head_dim");
  const auto small = [](int64_t v) { return v > 0 && v <= 1 << 16; };
  // Others are refused by validate_model_config(); here they could overflow the sum.
  if (small(c.num_attention_heads) && small(c.qk_nope_head_dim) && small(c.qk_rope_head_dim)) {
    // No grouped heads in K3's MLA: the key is redundant and must say so.
    text.optional_value("num_key_value_heads", {c.num_attention_heads});
    // Not used by this architecture; refused where it fits none of the readings seen in the wild.
    text.optional_value("head_dim", {c.v_head_dim, c.qk_nope_head_dim, c.qk_head_dim(),
                                     c.hidden_size / c.num_attention_heads});
  }

  std::vector<int64_t> full, kda;
  std::string linear_path;
  if (const json* object = text.required_object("linear_attn_config")) {
    ObjectReader linear(*object, text.path() + "linear_attn_config.");
    linear_path = linear.path();
    c.kda_num_heads = linear.required_int("num_heads");
    c.kda_head_dim = linear.required_int("head_dim");
    c.short_conv_kernel_size = linear.required_int("short_conv_kernel_size");
    c.gate_lower_bound = linear.required_float("gate_lower_bound");
    linear.required_value("use_full_rank_gate", true);
    full = linear.required_int_list("full_attn_layers");
    kda = linear.required_int_list("kda_layers");
    text.take_problems_of(linear);
    linear.append_ignored("linear_attn_config.", &c.ignored_keys);
  }

  // Published configs keep it in text_config; some tools lift it into the wrapper.
  const bool lifted = wrapped && root.contains("quantization_config") &&
                      !root["text_config"].contains("quantization_config");
  ObjectReader& quant_home = lifted ? wrapper : text;
  if (const json* object = quant_home.required_object("quantization_config")) {
    read_quantization(&quant_home, *object, "quantization_config.", &c.ignored_keys);
  }

  std::optional<int64_t> bos, pad;
  if (wrapped) {
    bos = wrapper.optional_int("bos_token_id");
    pad = wrapper.optional_int("pad_token_id");
    append_new(wrapper.optional_ids("eos_token_id"), &c.eos_token_ids);
  }
  const std::optional<int64_t> text_bos = text.optional_int("bos_token_id");
  const std::optional<int64_t> text_pad = text.optional_int("pad_token_id");
  append_new(text.optional_ids("eos_token_id"), &c.eos_token_ids);
  // The wrapper is what tools for the whole model read, so it wins; a loser is reported.
  if (bos && text_bos && *bos != *text_bos) c.ignored_keys.push_back("bos_token_id");
  if (pad && text_pad && *pad != *text_pad) c.ignored_keys.push_back("pad_token_id");
  c.bos_token_id = bos ? *bos : text_bos.value_or(-1);
  c.pad_token_id = pad ? *pad : text_pad.value_or(-1);

  text.append_ignored("", &c.ignored_keys);
  if (wrapped) wrapper.append_ignored("/", &c.ignored_keys);
  std::sort(c.ignored_keys.begin(), c.ignored_keys.end());

  // A wrong value says more than a missing one: a config of another model fails here by name.
  if (wrapped) text.take_problems_of(wrapper);
  if (!text.error().empty()) return checkpoint_error(origin, ": ", text.error());
  if (!text.missing().empty()) {
    std::string names;
    for (const std::string& key : text.missing()) names += (names.empty() ? "" : ", ") + key;
    return checkpoint_error(origin, ": missing ", names);
  }
  // Before anything is sized by it.
  if (c.num_hidden_layers < 1 || c.num_hidden_layers > 1024) {
    return checkpoint_error(origin, ": ", text.path(), "num_hidden_layers: found ",
                            c.num_hidden_layers, ", expected 1 to 1024");
  }
  K3_RETURN_IF_ERROR(read_layer_kinds(full, kda, cat(origin, ": ", linear_path), &c));
  K3_RETURN_IF_ERROR(validate_model_config(c, origin));
  return c;
}

Status validate_model_config(const ModelConfig& c, const std::string& origin) {
  // With these bounds the largest product, routed-expert bytes of a whole model, is below
  // 3 * 2^17 * 2^17 * 2^18 < 2^54, the trunk below 2^10 * 8 * 2^42 = 2^55, the cache of one
  // longest sequence below 2^60: int64_t holds every size, sum and offset.
  struct Bound {
    const char* key;
    int64_t value, lo, hi;
  };
  const Bound bounds[] = {
      {"hidden_size", c.hidden_size, 1, 1 << 17},
      {"vocab_size", c.vocab_size, 1, 1 << 22},
      {"num_hidden_layers", c.num_hidden_layers, 1, 1 << 10},
      {"intermediate_size", c.intermediate_size, 1, 1 << 20},
      {"first_k_dense_replace", c.first_k_dense_replace, 0, 1 << 10},
      {"max_position_embeddings", c.max_position_embeddings, 1, 1 << 30},
      {"attn_res_block_size", c.attn_res_block_size, 1, 1 << 10},
      {"num_attention_heads", c.num_attention_heads, 1, 1 << 10},
      {"q_lora_rank", c.q_lora_rank, 1, 1 << 16},
      {"kv_lora_rank", c.kv_lora_rank, 1, 1 << 16},
      {"qk_nope_head_dim", c.qk_nope_head_dim, 1, 1 << 12},
      {"qk_rope_head_dim", c.qk_rope_head_dim, 1, 1 << 12},
      {"v_head_dim", c.v_head_dim, 1, 1 << 12},
      {"linear_attn_config.num_heads", c.kda_num_heads, 1, 1 << 10},
      {"linear_attn_config.head_dim", c.kda_head_dim, 1, 1 << 12},
      {"linear_attn_config.short_conv_kernel_size", c.short_conv_kernel_size, 2, 16},
      {"num_experts", c.num_experts, 1, 1 << 14},
      {"num_experts_per_token", c.num_experts_per_token, 1, 1 << 10},
      {"num_shared_experts", c.num_shared_experts, 1, 1 << 6},
      {"moe_intermediate_size", c.moe_intermediate_size, 1, 1 << 17},
      {"routed_expert_hidden_size", c.routed_expert_hidden_size, 1, 1 << 17},
  };
  for (const Bound& b : bounds) {
    if (b.value < b.lo || b.value > b.hi) {
      return checkpoint_error(origin, ": ", b.key, ": found ", b.value, ", expected ", b.lo, " to ",
                              b.hi);
    }
  }
  if (c.num_hidden_layers * c.num_experts > 1 << 18) {
    return checkpoint_error(origin, ": num_hidden_layers * num_experts: found ",
                            c.num_hidden_layers * c.num_experts, ", expected at most ", 1 << 18);
  }
  for (const auto& [key, value] :
       {std::pair{"routed_expert_hidden_size", c.routed_expert_hidden_size},
        std::pair{"moe_intermediate_size", c.moe_intermediate_size}}) {
    if (value % 32 != 0) {
      return checkpoint_error(origin, ": ", key, ": found ", value,
                              ", expected a multiple of 32 (one MXFP4 scale spans 32 inputs)");
    }
  }
  if (c.num_experts_per_token > c.num_experts) {
    return checkpoint_error(origin, ": num_experts_per_token: found ", c.num_experts_per_token,
                            ", expected at most num_experts = ", c.num_experts);
  }
  if (c.num_checkpoint_layers < c.num_hidden_layers) {
    return checkpoint_error(origin, ": num_checkpoint_layers: found ", c.num_checkpoint_layers,
                            ", expected at least num_hidden_layers = ", c.num_hidden_layers);
  }
  if (static_cast<int64_t>(c.layer_kinds.size()) != c.num_hidden_layers) {
    return checkpoint_error(origin, ": layer kinds: found ", c.layer_kinds.size(),
                            ", expected num_hidden_layers = ", c.num_hidden_layers);
  }
  // Chunked prefill forms exp of up to 16 summed log-decays; below -5 that leaves float32.
  if (!(c.gate_lower_bound >= -5.0f && c.gate_lower_bound < 0.0f)) {
    return checkpoint_error(origin, ": linear_attn_config.gate_lower_bound: found ",
                            c.gate_lower_bound, ", expected -5 to below 0");
  }
  for (const auto& [key, value, hi] :
       {std::tuple{"activation_situ_beta", c.situ_beta, 1e4f},
        std::tuple{"activation_situ_linear_beta", c.situ_linear_beta, 1e4f},
        std::tuple{"rms_norm_eps", c.rms_norm_eps, 1e-2f},
        std::tuple{"routed_scaling_factor", c.routed_scaling_factor, 1e4f}}) {
    if (!(value > 0 && value <= hi)) {
      return checkpoint_error(origin, ": ", key, ": found ", value, ", expected above 0 to ", hi);
    }
  }
  for (const auto& [key, id] :
       {std::pair{"bos_token_id", c.bos_token_id}, std::pair{"pad_token_id", c.pad_token_id}}) {
    if (id < -1 || id >= c.vocab_size) {
      return checkpoint_error(origin, ": ", key, ": found ", id,
                              ", expected 0 to vocab_size - 1 = ", c.vocab_size - 1);
    }
  }
  for (const int64_t id : c.eos_token_ids) {
    if (id < 0 || id >= c.vocab_size) {
      return checkpoint_error(origin, ": eos_token_id: found ", id, " in ",
                              describe_list(c.eos_token_ids),
                              ", expected 0 to vocab_size - 1 = ", c.vocab_size - 1);
    }
  }
  return {};
}

Result<ModelConfig> load_model_config(const std::string& model_dir) {
  namespace fs = std::filesystem;
  std::error_code ec;
  if (!fs::is_directory(model_dir, ec)) {
    return checkpoint_error(model_dir, ": no such model directory");
  }
  const std::string path = (fs::path(model_dir) / "config.json").string();
  K3_ASSIGN_OR_RETURN(const std::string text, read_text_file(path, kMaxConfigBytes));
  K3_ASSIGN_OR_RETURN(ModelConfig config, parse_model_config(text, path));

  const std::string generation_path = (fs::path(model_dir) / "generation_config.json").string();
  if (fs::exists(
          fs::symlink_status(generation_path, ec))) {  // a link that leads nowhere is an error
    K3_ASSIGN_OR_RETURN(const std::string generation_text,
                        read_text_file(generation_path, kMaxConfigBytes));
    K3_ASSIGN_OR_RETURN(const json generation, parse_strict_json(generation_text, generation_path));
    if (!generation.is_object()) {
      return checkpoint_error(generation_path, ": found ", describe_json(generation),
                              ", expected a JSON object");
    }
    ObjectReader reader(generation, "");
    append_new(reader.optional_ids("eos_token_id"), &config.eos_token_ids);
    if (!reader.error().empty()) return checkpoint_error(generation_path, ": ", reader.error());
    K3_RETURN_IF_ERROR(validate_model_config(config, generation_path));
  }
  return config;
}

Result<ModelConfig> truncate_layers(const ModelConfig& config, int64_t num_layers) {
  if (num_layers < 1 || num_layers > config.num_hidden_layers) {
    return invalid_argument("layers: found ", num_layers, ", expected 1 to ",
                            config.num_hidden_layers);
  }
  ModelConfig cut = config;
  cut.num_hidden_layers = num_layers;
  cut.layer_kinds.resize(static_cast<size_t>(num_layers));
  return cut;
}

}  // namespace k3
