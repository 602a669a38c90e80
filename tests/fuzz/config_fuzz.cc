// Any bytes as a config.json: refused with a message, or a config whose sizes all fit and which
// reads back from what is written of it.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "checkpoint/load_plan.h"
#include "config/model_config.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  k3::Result<k3::ModelConfig> r = k3::parse_model_config(text, "fuzz");
  if (!r.ok()) {
    if (r.status().code() != k3::ErrorCode::kCheckpoint || r.status().message().empty()) {
      std::abort();
    }
    return 0;
  }
  k3::Result<k3::ModelConfig> back = k3::parse_model_config(k3::model_config_to_json(*r), "back");
  if (!back.ok()) std::abort();
  r->ignored_keys.clear();
  back->ignored_keys.clear();
  if (!(*r == *back)) std::abort();
  if (r->num_hidden_layers * r->num_experts < 4096) {
    const auto plan = k3::plan_load(*r, {});
    if (!plan.ok() || plan->held.bytes <= 0) std::abort();
  }
  return 0;
}
