#include "checkpoint/catalog.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "checkpoint/safetensors.h"
#include "core/strict_json.h"

namespace k3 {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kIndexName = "model.safetensors.index.json";
constexpr const char* kSingleName = "model.safetensors";
constexpr int64_t kMaxIndexBytes = int64_t{512} << 20;

// Up to ten of many, and how many there are: "3 missing: a, b, c".
class Listing {
 public:
  void add(std::string item) {
    if (++count_ <= kShown) items_.push_back(std::move(item));
  }
  int64_t count() const { return count_; }
  std::string text(const char* separator = ", ") const {
    std::string out;
    for (const std::string& item : items_) out += (out.empty() ? "" : separator) + item;
    if (count_ > kShown) out += cat(separator, "... (", count_, " in all)");
    return out;
  }

 private:
  static constexpr int64_t kShown = 10;
  int64_t count_ = 0;
  std::vector<std::string> items_;
};

// A shard must be a file beside its index, nothing that leads elsewhere.
bool is_plain_file_name(std::string_view name) {
  return !name.empty() && name.ends_with(".safetensors") &&
         name.find_first_of(std::string_view("/\\\0", 3)) == std::string_view::npos &&
         !name.starts_with('.');
}

enum class Role { kNeeded, kSkippedLayer, kVision };

class CatalogReader {
 public:
  CatalogReader(const std::string& model_dir, const ModelConfig& config)
      : dir_(model_dir), config_(config) {}

  Result<Catalog> read() {
    std::error_code ec;
    if (!fs::is_directory(dir_, ec)) {
      return checkpoint_error(dir_.string(), ": no such model directory");
    }
    const bool has_index = fs::exists(dir_ / kIndexName, ec);
    const bool has_single = fs::exists(dir_ / kSingleName, ec);
    if (has_index) {
      K3_RETURN_IF_ERROR(read_index());
      note_strays();
    } else if (has_single) {
      K3_RETURN_IF_ERROR(read_single());
    } else {
      return checkpoint_error(dir_.string(), ": neither ", kIndexName, " nor ", kSingleName);
    }
    K3_RETURN_IF_ERROR(find_prefix());
    K3_RETURN_IF_ERROR(match_names());
    for (size_t shard = 0; shard < shards_.size(); ++shard) {
      if (shards_[shard].needed > 0) K3_RETURN_IF_ERROR(read_shard(shard));
    }
    if (violations_.count() > 0) {
      return checkpoint_error(dir_.string(), ": ", violations_.text("; "));
    }
    note_total_size();
    return std::move(catalog_);
  }

 private:
  struct Entry {
    size_t shard = 0;
    Role role = Role::kNeeded;
    size_t spec = 0;  // into catalog_.tensors, for kNeeded
    bool seen = false;
  };
  struct Shard {
    std::string name;
    int64_t needed = 0;
    std::string first_needed;
    bool read = false;
  };

  Status read_index() {
    const std::string path = (dir_ / kIndexName).string();
    K3_ASSIGN_OR_RETURN(const std::string text, read_text_file(path, kMaxIndexBytes));
    K3_ASSIGN_OR_RETURN(const json root, parse_strict_json(text, path, 8));
    if (!root.is_object() || !root.contains("weight_map") || !root["weight_map"].is_object()) {
      return checkpoint_error(path, ": no object weight_map");
    }
    std::map<std::string, size_t, std::less<>> shard_numbers;
    for (const auto& item : root["weight_map"].items()) {
      if (!item.value().is_string()) {
        return checkpoint_error(path, ": tensor ", item.key(), ": found ",
                                describe_json(item.value()), ", expected a file name");
      }
      const std::string& file = item.value().get_ref<const std::string&>();
      const auto [it, is_new] = shard_numbers.emplace(file, shards_.size());
      if (is_new) {
        if (!is_plain_file_name(file)) {
          return checkpoint_error(path, ": tensor ", item.key(), ": shard ",
                                  describe_json(item.value()),
                                  ", expected the name of a .safetensors file in this directory");
        }
        shards_.push_back({file, 0, "", false});
      }
      entries_[item.key()].shard = it->second;
    }
    if (const json metadata = root.value("metadata", json::object()); !metadata.is_object()) {
      catalog_.notes.push_back(
          cat(kIndexName, ": metadata: found ", describe_json(metadata), ", expected an object"));
    } else if (const auto total = metadata.find("total_size"); total != metadata.end()) {
      if (total->is_number_unsigned()) {
        declared_total_ = total->get<uint64_t>();
      } else {
        catalog_.notes.push_back(cat(kIndexName, ": metadata.total_size: found ",
                                     describe_json(*total), ", expected a number of bytes"));
      }
    }
    return {};
  }

  Status read_single() {
    shards_.push_back({kSingleName, 0, "", false});
    K3_ASSIGN_OR_RETURN(single_header_, read_safetensors_header((dir_ / kSingleName).string()));
    for (const SafetensorsTensor& t : single_header_.tensors) entries_[t.name].shard = 0;
    return {};
  }

  void note_strays() {
    std::set<std::string> named;
    for (const Shard& shard : shards_) named.insert(shard.name);
    Listing strays;
    std::error_code ec;
    std::set<std::string> found;
    for (const auto& entry : fs::directory_iterator(dir_, ec)) {
      if (entry.path().extension() == ".safetensors") found.insert(entry.path().filename());
    }
    for (const std::string& name : found) {
      if (!named.contains(name)) strays.add(name);
    }
    if (strays.count() > 0) {
      catalog_.notes.push_back(cat("ignored, not named by ", kIndexName, ": ", strays.text()));
    }
  }

  // All text tensors carry the prefix or none does.
  Status find_prefix() {
    const std::string* with = nullptr;
    const std::string* without = nullptr;
    for (const auto& [name, entry] : entries_) {
      if (name.starts_with(kTextPrefix)) {
        if (!with) with = &name;
      } else if (name.starts_with("model.") || name.starts_with("lm_head.")) {
        if (!without) without = &name;
      }
    }
    if (with && without) {
      return checkpoint_error(dir_.string(), ": tensor ", *with, " has the prefix ", kTextPrefix,
                              ", tensor ", *without, " has not, expected all or none");
    }
    catalog_.prefixed = with != nullptr;
    return {};
  }

  Status match_names() {
    std::unordered_map<std::string_view, size_t> spec_of;
    {
      std::vector<TensorSpec> specs = build_manifest(config_);
      catalog_.tensors.resize(specs.size());
      spec_of.reserve(specs.size());
      for (size_t i = 0; i < specs.size(); ++i) {
        catalog_.tensors[i].spec = std::move(specs[i]);
        spec_of.emplace(catalog_.tensors[i].spec.name, i);
      }
    }
    const int64_t all_layers = std::max(config_.num_checkpoint_layers, config_.num_hidden_layers);
    std::vector<bool> found(catalog_.tensors.size(), false);
    Listing unexpected;
    for (auto& [name, entry] : entries_) {
      if (is_vision_name(name)) {
        entry.role = Role::kVision;
        ++catalog_.skipped_vision.tensors;
        continue;
      }
      std::string_view canonical = name;
      if (catalog_.prefixed && canonical.starts_with(kTextPrefix)) {
        canonical.remove_prefix(kTextPrefix.size());
      }
      const int64_t layer = layer_of_name(canonical);
      if (layer >= config_.num_hidden_layers && layer < all_layers) {
        entry.role = Role::kSkippedLayer;
        ++catalog_.skipped_layers.tensors;
        continue;
      }
      K3_RETURN_IF_ERROR(check_kind(canonical, layer));
      const auto it = spec_of.find(canonical);
      // Unprefixed names can only be in a prefixed checkpoint what find_prefix() let pass.
      if (it == spec_of.end() || (catalog_.prefixed && !name.starts_with(kTextPrefix))) {
        unexpected.add(name);
        continue;
      }
      entry.spec = it->second;
      found[entry.spec] = true;
      Shard& shard = shards_[entry.shard];
      if (shard.needed++ == 0) shard.first_needed = name;
    }
    Listing missing;
    for (size_t i = 0; i < found.size(); ++i) {
      if (!found[i]) missing.add(catalog_.tensors[i].spec.name);
    }
    if (missing.count() == 0 && unexpected.count() == 0) return {};
    std::string text;
    if (missing.count() > 0) text = cat(missing.count(), " missing: ", missing.text());
    if (unexpected.count() > 0) {
      text += cat(text.empty() ? "" : "; ", unexpected.count(), " unexpected: ", unexpected.text());
    }
    return checkpoint_error(dir_.string(),
                            ": tensors differ from what config.json implies: ", text);
  }

  // A_log exists in KDA layers only, kv_b_proj in MLA layers only.
  Status check_kind(std::string_view canonical, int64_t layer) const {
    if (layer < 0 || layer >= config_.num_hidden_layers) return {};
    const bool says_kda = canonical.ends_with(".self_attn.A_log");
    const bool says_mla = canonical.ends_with(".self_attn.kv_b_proj.weight");
    const bool is_kda = config_.layer_kinds[static_cast<size_t>(layer)] == LayerKind::kKda;
    if ((!says_kda || is_kda) && (!says_mla || !is_kda)) return {};
    return checkpoint_error(dir_.string(), ": layer ", layer, ": tensor ", canonical, " makes it ",
                            says_kda ? "KDA" : "MLA", ", but config.json lists layer ", layer + 1,
                            " (counted from one) in ", is_kda ? "kda_layers" : "full_attn_layers");
  }

  Status read_shard(size_t number) {
    Shard& shard = shards_[number];
    const std::string path = (dir_ / shard.name).string();
    std::error_code ec;
    if (!fs::exists(path, ec)) {
      return checkpoint_error(path, ": no such file; ", kIndexName, " says that it holds ",
                              shard.needed, " needed tensors, the first ", shard.first_needed);
    }
    SafetensorsHeader header;
    if (shard.name == kSingleName && !single_header_.tensors.empty()) {
      header = std::move(single_header_);
    } else {
      K3_ASSIGN_OR_RETURN(header, read_safetensors_header(path));
    }
    shard.read = true;
    const auto file = static_cast<int32_t>(catalog_.files.size());
    catalog_.files.push_back(
        {path, header.tensors.empty() ? header.payload_begin : header.tensors.back().end});

    int64_t seen = 0;
    Listing foreign;
    for (const SafetensorsTensor& t : header.tensors) {
      total_found_ += static_cast<uint64_t>(t.end - t.begin);
      const auto it = entries_.find(t.name);
      if (it == entries_.end()) {
        foreign.add(cat(t.name, " (not in the index)"));
        continue;
      }
      Entry& entry = it->second;
      if (entry.shard != number) {
        foreign.add(cat(t.name, " (the index says ", shards_[entry.shard].name, ")"));
        continue;
      }
      if (entry.role == Role::kVision) {
        catalog_.skipped_vision.bytes += t.end - t.begin;
      } else if (entry.role == Role::kSkippedLayer) {
        catalog_.skipped_layers.bytes += t.end - t.begin;
      } else {
        ++seen;
        entry.seen = true;
        LocatedTensor& located = catalog_.tensors[entry.spec];
        located.file = file;
        located.offset = t.begin;
        check_contract(t, located.spec, shard.name);
      }
    }
    if (foreign.count() > 0) {
      return checkpoint_error(path, ": ", foreign.count(),
                              " tensors that the index does not place here: ", foreign.text());
    }
    if (seen != shard.needed) {
      Listing absent;
      for (const auto& [name, entry] : entries_) {
        if (entry.shard == number && entry.role == Role::kNeeded && !entry.seen) absent.add(name);
      }
      return checkpoint_error(path, ": lacks ", absent.count(),
                              " tensors that the index places here: ", absent.text());
    }
    return {};
  }

  void check_contract(const SafetensorsTensor& found, const TensorSpec& spec,
                      const std::string& shard) {
    if (found.dtype != dtype_name(spec.dtype)) {
      violations_.add(cat("tensor ", spec.name, ": dtype ", found.dtype, ", expected ",
                          dtype_name(spec.dtype), " (", shard, ")"));
    } else if (found.shape != spec.shape) {
      std::string why;
      if (spec.name.ends_with(".A_log")) {
        why = cat(", ", config_.kda_num_heads, " live + zero tail");
      }
      violations_.add(cat("tensor ", spec.name, ": shape ", shape_text(found.shape), ", expected ",
                          shape_text(spec.shape), " (", shard, why, ")"));
    }
  }

  void note_total_size() {
    const bool all_read =
        std::all_of(shards_.begin(), shards_.end(), [](const Shard& s) { return s.read; });
    if (declared_total_ && all_read && *declared_total_ != total_found_) {
      catalog_.notes.push_back(cat(kIndexName, ": total_size says ", *declared_total_,
                                   " bytes, the shards hold ", total_found_));
    }
  }

  const fs::path dir_;
  const ModelConfig& config_;
  Catalog catalog_;
  std::map<std::string, Entry, std::less<>> entries_;  // by name as the files write it
  std::vector<Shard> shards_;
  SafetensorsHeader single_header_;
  std::optional<uint64_t> declared_total_;
  uint64_t total_found_ = 0;
  Listing violations_;
};

}  // namespace

Result<Catalog> read_catalog(const std::string& model_dir, const ModelConfig& config) {
  return CatalogReader(model_dir, config).read();
}

}  // namespace k3
