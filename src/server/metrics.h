// Counters and histograms in Prometheus' text form, named as vLLM names them with the prefix `k3:`.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "engine/request.h"

namespace k3 {

class Histogram {
 public:
  explicit Histogram(std::vector<double> bounds);  // ascending upper bounds
  void observe(double value);
  void print(const std::string& name, const std::string& help, const std::string& labels,
             std::string* out) const;

 private:
  const std::vector<double> bounds_;
  mutable std::mutex mutex_;
  std::vector<int64_t> counts_;  // one more than bounds
  double sum_ = 0;
};

// All members may be used from any thread.
class Metrics {
 public:
  Metrics();
  void count_http(const std::string& method, const std::string& path, int status);
  // A choice finished by the engine. `finish` is the reason the client sees.
  void count_choice(const FinishInfo& info, const std::string& finish);

  std::atomic<int64_t> connections{0};
  std::atomic<int64_t> slow_readers{0};  // requests cancelled because their client did not read
  std::atomic<int64_t> disconnects{0};   // requests cancelled because their client went away

  // `engine` null while loading.
  std::string print(const std::string& model, const EngineStats* engine) const;

 private:
  Histogram ttft_, tpot_, e2e_, queue_;
  Histogram prompt_tokens_, generation_tokens_;
  mutable std::mutex mutex_;
  std::map<std::array<std::string, 3>, int64_t> http_;  // method, path, status
  std::map<std::string, int64_t> finished_;
};

}  // namespace k3
