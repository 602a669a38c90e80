// Small checkpoints in temporary directories, and the means to break them in one place at a time.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "checkpoint/synth.h"

namespace k3::testing {

namespace fs = std::filesystem;

class TempDir {
 public:
  TempDir() {
    std::string pattern = (fs::temp_directory_path() / "k3_ckpt_XXXXXX").string();
    path_ = ::mkdtemp(pattern.data());
  }
  ~TempDir() { fs::remove_all(path_); }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  fs::path path() const { return path_; }
  std::string str() const { return path_.string(); }

 private:
  fs::path path_;
};

inline std::string read_file(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::stringstream text;
  text << in.rdbuf();
  return text.str();
}
inline void write_file(const fs::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << text;
}

struct RawTensor {
  std::string dtype;
  std::vector<int64_t> shape;
  std::string data;
};
using RawShard = std::map<std::string, RawTensor>;

// A reader and writer of their own, so that the code under test is not its own witness.
inline RawShard read_shard(const fs::path& path) {
  const std::string file = read_file(path);
  uint64_t length = 0;
  std::memcpy(&length, file.data(), 8);
  const auto header = nlohmann::json::parse(file.substr(8, length));
  RawShard out;
  for (const auto& item : header.items()) {
    if (item.key() == "__metadata__") continue;
    const size_t begin = item.value()["data_offsets"][0], end = item.value()["data_offsets"][1];
    out[item.key()] = {item.value()["dtype"], item.value()["shape"],
                       file.substr(8 + length + begin, end - begin)};
  }
  return out;
}
inline std::string shard_bytes(const nlohmann::json& header, const std::string& payload,
                               const std::string& padding = "") {
  const std::string text = header.dump() + padding;
  const uint64_t length = text.size();
  std::string out(8, '\0');
  std::memcpy(out.data(), &length, 8);
  return out + text + payload;
}
inline std::string shard_bytes(const RawShard& shard, const std::string& padding = "") {
  nlohmann::json header = nlohmann::json::object();
  std::string payload;
  for (const auto& [name, t] : shard) {
    header[name] = {{"dtype", t.dtype},
                    {"shape", t.shape},
                    {"data_offsets", {payload.size(), payload.size() + t.data.size()}}};
    payload += t.data;
  }
  return shard_bytes(header, payload, padding);
}

// 5 layers (MLA at 3 and 4), 8 experts; 0.5 MB in several shards.
inline ModelConfig micro_config() {
  ModelConfig c = *synth_preset("tiny", 5, 8);
  c.hidden_size = 64;
  c.vocab_size = 320;
  c.intermediate_size = 96;
  c.attn_res_block_size = 2;
  c.q_lora_rank = 32;
  c.kv_lora_rank = 32;
  c.qk_nope_head_dim = 16;
  c.qk_rope_head_dim = 8;
  c.v_head_dim = 16;
  c.kda_head_dim = 16;
  c.num_experts_per_token = 2;
  c.moe_intermediate_size = 32;
  c.routed_expert_hidden_size = 64;
  c.pad_token_id = 319;
  return c;
}

// A freshly written checkpoint of micro_config().
class MicroCheckpoint {
 public:
  explicit MicroCheckpoint(const std::function<void(SynthOptions*)>& adjust = {}) {
    SynthOptions options;
    options.config = micro_config();
    options.max_shard_bytes = 128 << 10;
    options.num_threads = 1;
    if (adjust) adjust(&options);
    config_ = options.config;
    const Status s = write_synthetic(options, dir_.str());
    EXPECT_TRUE(s.ok()) << s.message();
  }

  fs::path path(const std::string& name) const { return dir_.path() / name; }
  std::string dir() const { return dir_.str(); }
  const ModelConfig& config() const { return config_; }

  nlohmann::json index() const {
    return nlohmann::json::parse(read_file(path("model.safetensors.index.json")));
  }
  void write_index(const nlohmann::json& index) const {
    write_file(path("model.safetensors.index.json"), index.dump());
  }
  // The shard that holds `name` (as the files write it).
  std::string shard_of(const std::string& name) const { return index()["weight_map"].at(name); }

  void edit_shard_of(const std::string& name, const std::function<void(RawShard&)>& edit) const {
    const fs::path file = path(shard_of(name));
    RawShard shard = read_shard(file);
    edit(shard);
    write_file(file, shard_bytes(shard));
  }
  void edit_index(const std::function<void(nlohmann::json&)>& edit) const {
    nlohmann::json root = index();
    edit(root["weight_map"]);
    write_index(root);
  }
  // Removes the tensor from shard and index; its bytes are returned.
  RawTensor remove(const std::string& name) const {
    RawTensor removed;
    edit_shard_of(name, [&](RawShard& s) {
      removed = s.at(name);
      s.erase(name);
    });
    edit_index([&](nlohmann::json& map) { map.erase(name); });
    return removed;
  }
  void add(const std::string& name, const RawTensor& tensor, const std::string& shard) const {
    const fs::path file = path(shard);
    RawShard content = read_shard(file);
    content[name] = tensor;
    write_file(file, shard_bytes(content));
    edit_index([&](nlohmann::json& map) { map[name] = shard; });
  }
  // All tensors in one model.safetensors, no index.
  void merge_into_single_file(const std::string& padding = "") const {
    RawShard all;
    for (const auto& entry : fs::directory_iterator(dir_.path())) {
      if (entry.path().extension() != ".safetensors") continue;
      all.merge(read_shard(entry.path()));
      fs::remove(entry.path());
    }
    write_file(path("model.safetensors"), shard_bytes(all, padding));
    fs::remove(path("model.safetensors.index.json"));
  }

  Result<std::unique_ptr<Checkpoint>> open(const RankSpec& rank = {}) const {
    const Result<ModelConfig> config = load_model_config(dir());
    if (!config.ok()) return config.status();
    return Checkpoint::open(dir(), *config, rank);
  }
  // Message of the refusal, which must be a kCheckpoint error.
  std::string refusal() const {
    const auto r = open();
    if (r.ok()) return "(accepted)";
    EXPECT_EQ(r.status().code(), ErrorCode::kCheckpoint);
    return r.status().message();
  }

 private:
  TempDir dir_;
  ModelConfig config_;
};

inline const std::string kPrefix = "language_model.";

}  // namespace k3::testing
