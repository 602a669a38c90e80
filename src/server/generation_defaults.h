// What generation_config.json says about sampling; a request that leaves a field out gets these, as
// with vLLM.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "core/status.h"

namespace k3 {

struct GenerationDefaults {
  float temperature = 1.0f;
  float top_p = 1.0f;
  int32_t top_k = 0;
  float min_p = 0.0f;
  float repetition_penalty = 1.0f;
};

// Reads DIR/generation_config.json; a directory without one gives the defaults above. kCheckpoint
// for JSON that cannot be read or a value out of the field's range.
Result<GenerationDefaults> load_generation_defaults(const std::string& model_dir);
Result<GenerationDefaults> parse_generation_defaults(std::string_view json,
                                                     const std::string& origin);

}  // namespace k3
