// Opens the models the gates run on and feeds them tokens.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "cpu/cpu_executor.h"
#include "cpu/kernels/kernels.h"

namespace k3::gates {

inline const std::string kSource = K3_SOURCE_DIR;
inline const std::string kNano = kSource + "/models/k3-nano";
inline const std::string kOracleData = kSource + "/tests/data/oracle/";
inline const std::string kOracleModels = std::string(K3_BINARY_DIR) + "/oracle/";
inline const std::string kGoldens = kSource + "/tests/data/k3-nano-goldens/";

struct Model {
  ModelConfig config;
  std::shared_ptr<const Checkpoint> checkpoint;

  static Model open(const std::string& dir) {
    Model m;
    Result<ModelConfig> config = load_model_config(dir);
    EXPECT_TRUE(config.ok()) << config.status().message();
    m.config = *config;
    Result<std::unique_ptr<Checkpoint>> checkpoint = Checkpoint::open(dir, m.config, RankSpec{});
    EXPECT_TRUE(checkpoint.ok()) << checkpoint.status().message();
    m.checkpoint = std::move(*checkpoint);
    return m;
  }

  std::unique_ptr<CpuExecutor> executor(CpuExecutorOptions options) const {
    auto e = CpuExecutor::create(checkpoint, config, RankSpec{}, options);
    EXPECT_TRUE(e.ok()) << e.status().message();
    return std::move(*e);
  }
};

inline CpuExecutorOptions options(Numerics numerics = Numerics::kF32, int threads = 2) {
  CpuExecutorOptions o;
  o.policy.numerics = numerics;
  o.num_threads = threads;
  o.max_rows = 512;
  o.max_logit_rows = 512;
  o.num_pages = 64;
  return o;
}

// Ids in [0, limit); 1792 is where k3-nano's special tokens begin.
inline std::vector<int32_t> random_ids(int64_t count, uint32_t seed, uint32_t limit = 1792) {
  std::mt19937 random(seed);
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < count; ++i) ids.push_back(static_cast<int32_t>(random() % limit));
  return ids;
}

inline bool same_bits(std::span<const float> a, std::span<const float> b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size_bytes()) == 0;
}

inline std::vector<int32_t> iota_pages(int64_t tokens, int32_t first = 0) {
  std::vector<int32_t> pages(static_cast<size_t>((tokens + kPageTokens - 1) / kPageTokens));
  std::iota(pages.begin(), pages.end(), first);
  return pages;
}

// Logits [tokens, vocab] of one sequence fed in chunks of `chunk`.
inline std::vector<float> feed(Executor& e, const std::vector<int32_t>& tokens, int64_t chunk,
                               int slot = 0, std::vector<int32_t> pages = {}) {
  const auto count = static_cast<int64_t>(tokens.size());
  if (pages.empty()) pages = iota_pages(count);
  std::vector<float> logits;
  for (int64_t at = 0; at < count; at += chunk) {
    const auto n = static_cast<size_t>(std::min(chunk, count - at));
    StepResult result;
    const Status s = e.step({{{slot, at, {tokens.data() + at, n}, pages, Logits::kAll}}}, &result);
    EXPECT_TRUE(s.ok()) << s.message();
    if (!s.ok()) return {};
    logits.insert(logits.end(), result.logits.begin(), result.logits.end());
  }
  return logits;
}

inline std::vector<float> read_f32(const std::string& path) {
  std::ifstream in(path, std::ios::binary | std::ios::ate);
  EXPECT_TRUE(in) << path;
  std::vector<float> values(static_cast<size_t>(in.tellg()) / sizeof(float));
  in.seekg(0);
  in.read(reinterpret_cast<char*>(values.data()),
          static_cast<std::streamsize>(values.size() * sizeof(float)));
  return values;
}

inline std::vector<int32_t> read_ids(const std::string& path) {
  std::ifstream in(path);
  EXPECT_TRUE(in) << path;
  std::vector<int32_t> ids;
  for (int32_t id; in >> id;) ids.push_back(id);
  return ids;
}

inline int64_t argmax(const float* row, int64_t n) { return std::max_element(row, row + n) - row; }

}  // namespace k3::gates
