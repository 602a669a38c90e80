#include "checkpoint/inspect.h"

#include <cstdio>
#include <functional>
#include <nlohmann/json.hpp>
#include <utility>

#include "checkpoint/catalog.h"

namespace k3 {
namespace {

using nlohmann::ordered_json;

// "1,559,965,606,912"
std::string with_commas(int64_t value) {
  const std::string digits = std::to_string(value);
  std::string out;
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) out += ',';
    out += digits[i];
  }
  return out;
}

// "1452.83 GiB"
std::string readable(int64_t bytes) {
  const char* unit = "B";
  double value = static_cast<double>(bytes);
  for (const char* next : {"KiB", "MiB", "GiB"}) {
    if (value < 1024) break;
    value /= 1024;
    unit = next;
  }
  char text[48];
  std::snprintf(text, sizeof(text), *unit == 'B' ? "%.0f %s" : "%.2f %s", value, unit);
  return text;
}

// "0-2, 4-6, 8": the layers for which `is` holds.
std::string layer_ranges(const ModelConfig& c, const std::function<bool(int64_t)>& is) {
  std::string out;
  for (int64_t i = 0; i < c.num_hidden_layers; ++i) {
    if (!is(i)) continue;
    int64_t last = i;
    while (last + 1 < c.num_hidden_layers && is(last + 1)) ++last;
    out += cat(out.empty() ? "" : ", ", i);
    if (last > i) out += cat("-", last);
    i = last;
  }
  return out.empty() ? "none" : out;
}

ordered_json count_json(const TensorCount& count) {
  return {{"tensors", count.tensors}, {"bytes", count.bytes}};
}

std::vector<int64_t> layers_of(const ModelConfig& c, LayerKind kind) {
  std::vector<int64_t> out;
  for (int64_t i = 0; i < c.num_hidden_layers; ++i) {
    if (c.layer_kinds[static_cast<size_t>(i)] == kind) out.push_back(i);
  }
  return out;
}

}  // namespace

StateBytes state_bytes(const ModelConfig& c) {
  StateBytes s;
  s.kda_recurrent_per_slot = c.num_kda_layers() * c.kda_dim() * c.kda_head_dim * 4;
  s.kda_conv_per_slot = c.num_kda_layers() * (c.short_conv_kernel_size - 1) * 3 * c.kda_dim() * 2;
  s.mla_cache_per_token = c.num_mla_layers() * c.mla_latent_dim() * 2;
  return s;
}

Result<InspectReport> inspect_checkpoint(const std::string& model_dir,
                                         const InspectOptions& options) {
  InspectReport report;
  report.model_dir = model_dir;
  K3_ASSIGN_OR_RETURN(report.config, load_model_config(model_dir));
  if (options.num_layers != 0) {
    K3_ASSIGN_OR_RETURN(report.config, truncate_layers(report.config, options.num_layers));
  }
  const ModelConfig& config = report.config;
  K3_ASSIGN_OR_RETURN(report.whole, plan_load(config, {1, 0}));
  // Ranks differ in which experts they hold, not in how many bytes those take.
  K3_ASSIGN_OR_RETURN(const LoadPlan first, plan_load(config, {options.ep_size, 0}));
  for (int64_t r = 0; r < options.ep_size; ++r) {
    LoadPlan plan = first;
    plan.rank.ep_rank = r;
    plan.first_expert = r * first.end_expert;
    plan.end_expert = (r + 1) * first.end_expert;
    report.ranks.push_back(std::move(plan));
  }
  report.state = state_bytes(config);

  const Result<Catalog> catalog = read_catalog(model_dir, config);
  report.coverage = catalog.status();
  if (catalog.ok()) {
    report.num_files = static_cast<int64_t>(catalog->files.size());
    for (const CatalogFile& file : catalog->files) report.file_bytes += file.size;
    report.prefixed = catalog->prefixed;
    report.whole.skipped_layers = catalog->skipped_layers;
    report.whole.skipped_vision = catalog->skipped_vision;
    report.whole.notes = catalog->notes;
  }
  return report;
}

std::string render_text(const InspectReport& r) {
  const ModelConfig& c = r.config;
  std::string out;
  const auto line = [&](const auto&... parts) { out += cat(parts..., "\n"); };
  line(r.model_dir);
  if (r.coverage.ok()) {
    line("coverage    complete: ", with_commas(r.whole.held.tensors), " tensors in ", r.num_files,
         r.num_files == 1 ? " file" : " files", ", names ", r.prefixed ? "with" : "without",
         " language_model.");
  } else {
    line("coverage    NOT USABLE: ", r.coverage.message());
  }
  for (const std::string& note : r.whole.notes) line("note        ", note);
  for (const auto& [what, count] : {std::pair{"layers cut off", r.whole.skipped_layers},
                                    std::pair{"vision", r.whole.skipped_vision}}) {
    if (count.tensors > 0) {
      line("skipped     ", what, ": ", with_commas(count.tensors), " tensors, ",
           with_commas(count.bytes), " bytes in the headers read");
    }
  }
  line("");
  line("layers      ", c.num_hidden_layers,
       c.num_checkpoint_layers > c.num_hidden_layers
           ? cat(" of ", c.num_checkpoint_layers, " (cut)")
           : "",
       ", hidden ", c.hidden_size, ", vocabulary ", c.vocab_size, ", context ",
       c.max_position_embeddings);
  const auto kind_is = [&](LayerKind kind) {
    return [&c, kind](int64_t i) { return c.layer_kinds[static_cast<size_t>(i)] == kind; };
  };
  line("KDA         ", layer_ranges(c, kind_is(LayerKind::kKda)), " (", c.kda_num_heads,
       " heads of ", c.kda_head_dim, ", convolution ", c.short_conv_kernel_size, ")");
  line("MLA         ", layer_ranges(c, kind_is(LayerKind::kMla)), " (", c.num_attention_heads,
       " heads of ", c.qk_nope_head_dim, " + ", c.qk_rope_head_dim, ", value ", c.v_head_dim,
       ", q rank ", c.q_lora_rank, ", kv rank ", c.kv_lora_rank, ")");
  line("dense MLP   ", layer_ranges(c, [&](int64_t i) { return !c.is_moe_layer(i); }), " (width ",
       c.intermediate_size, ")");
  line("MoE         ", layer_ranges(c, [&](int64_t i) { return c.is_moe_layer(i); }), " (",
       c.num_experts, " experts, top ", c.num_experts_per_token, ", latent ",
       c.routed_expert_hidden_size, ", expert width ", c.moe_intermediate_size, ", shared width ",
       c.shared_intermediate_size(), ")");
  line("snapshots   ", layer_ranges(c, [&](int64_t i) { return c.is_snapshot_layer(i); }),
       " (every ", c.attn_res_block_size, ")");
  std::string eos;
  for (const int64_t id : c.eos_token_ids) eos += cat(eos.empty() ? "" : ", ", id);
  line("tokens      bos ", c.bos_token_id, ", eos ", eos.empty() ? "none" : eos, ", pad ",
       c.pad_token_id);
  if (!c.ignored_keys.empty()) {
    std::string keys;
    for (const std::string& key : c.ignored_keys) keys += (keys.empty() ? "" : ", ") + key;
    line("ignored     config keys that change nothing here: ", keys);
  }
  line("");

  char row[160];
  std::snprintf(row, sizeof(row), "%-20s %9s %21s", "weights", "tensors", "bytes");
  line(row);
  const auto weights = [&](const char* name, const TensorCount& count) {
    std::snprintf(row, sizeof(row), "%-20s %9s %21s  %s", name, with_commas(count.tensors).c_str(),
                  with_commas(count.bytes).c_str(), readable(count.bytes).c_str());
    line(row);
  };
  for (int g = 0; g < kNumTensorGroups; ++g) {
    weights(tensor_group_name(static_cast<TensorGroup>(g)), r.whole.groups[static_cast<size_t>(g)]);
  }
  weights("total", r.whole.held);
  if (r.ranks.size() > 1) {
    line("");
    for (const LoadPlan& plan : r.ranks) {
      line("rank ", plan.rank.ep_rank, " of ", plan.rank.ep_size, ": experts ", plan.first_expert,
           " to ", plan.end_expert - 1, ", ", with_commas(plan.held.bytes), " bytes  ",
           readable(plan.held.bytes));
    }
  }
  line("");
  const int64_t slot = r.state.kda_recurrent_per_slot + r.state.kda_conv_per_slot;
  line("KDA state   ", with_commas(slot), " bytes per sequence, whatever its length (",
       with_commas(r.state.kda_recurrent_per_slot), " recurrent + ",
       with_commas(r.state.kda_conv_per_slot), " convolution)");
  line("MLA cache   ", with_commas(r.state.mla_cache_per_token), " bytes per token, ",
       readable(r.state.mla_cache_per_token * c.max_position_embeddings), " at full context");
  return out;
}

std::string render_json(const InspectReport& r) {
  const ModelConfig& c = r.config;
  ordered_json groups;
  for (int g = 0; g < kNumTensorGroups; ++g) {
    groups[tensor_group_name(static_cast<TensorGroup>(g))] =
        count_json(r.whole.groups[static_cast<size_t>(g)]);
  }
  ordered_json ranks = ordered_json::array();
  for (const LoadPlan& plan : r.ranks) {
    ranks.push_back({{"rank", plan.rank.ep_rank},
                     {"first_expert", plan.first_expert},
                     {"end_expert", plan.end_expert},
                     {"tensors", plan.held.tensors},
                     {"bytes", plan.held.bytes}});
  }
  std::vector<int64_t> snapshots;
  for (int64_t i = 0; i < c.num_hidden_layers; i += c.attn_res_block_size) snapshots.push_back(i);
  ordered_json root = {
      {"model_dir", r.model_dir},
      {"coverage",
       {{"complete", r.coverage.ok()},
        {"problem", r.coverage.ok() ? ordered_json() : ordered_json(r.coverage.message())},
        {"files", r.num_files},
        {"file_bytes", r.file_bytes},
        {"language_model_prefix", r.prefixed},
        {"skipped_layers", count_json(r.whole.skipped_layers)},
        {"skipped_vision", count_json(r.whole.skipped_vision)},
        {"notes", r.whole.notes}}},
      {"config",
       {{"num_hidden_layers", c.num_hidden_layers},
        {"num_checkpoint_layers", c.num_checkpoint_layers},
        {"hidden_size", c.hidden_size},
        {"vocab_size", c.vocab_size},
        {"max_position_embeddings", c.max_position_embeddings},
        {"intermediate_size", c.intermediate_size},
        {"first_k_dense_replace", c.first_k_dense_replace},
        {"attn_res_block_size", c.attn_res_block_size},
        {"num_attention_heads", c.num_attention_heads},
        {"q_lora_rank", c.q_lora_rank},
        {"kv_lora_rank", c.kv_lora_rank},
        {"qk_nope_head_dim", c.qk_nope_head_dim},
        {"qk_rope_head_dim", c.qk_rope_head_dim},
        {"v_head_dim", c.v_head_dim},
        {"kda_num_heads", c.kda_num_heads},
        {"kda_head_dim", c.kda_head_dim},
        {"short_conv_kernel_size", c.short_conv_kernel_size},
        {"num_experts", c.num_experts},
        {"num_experts_per_token", c.num_experts_per_token},
        {"num_shared_experts", c.num_shared_experts},
        {"moe_intermediate_size", c.moe_intermediate_size},
        {"routed_expert_hidden_size", c.routed_expert_hidden_size},
        {"bos_token_id", c.bos_token_id},
        {"eos_token_ids", c.eos_token_ids},
        {"pad_token_id", c.pad_token_id},
        {"ignored_keys", c.ignored_keys}}},
      {"layers",
       {{"kda", layers_of(c, LayerKind::kKda)},
        {"mla", layers_of(c, LayerKind::kMla)},
        {"snapshots", snapshots}}},
      {"weights", {{"groups", groups}, {"total", count_json(r.whole.held)}}},
      {"ranks", ranks},
      {"state",
       {{"kda_recurrent_bytes_per_slot", r.state.kda_recurrent_per_slot},
        {"kda_conv_bytes_per_slot", r.state.kda_conv_per_slot},
        {"mla_cache_bytes_per_token", r.state.mla_cache_per_token}}},
  };
  return root.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

}  // namespace k3
