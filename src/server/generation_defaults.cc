#include "server/generation_defaults.h"

#include <filesystem>
#include <nlohmann/json.hpp>

#include "core/strict_json.h"
#include "engine/request.h"
#include "server/fields.h"

namespace k3 {

Result<GenerationDefaults> parse_generation_defaults(std::string_view json,
                                                     const std::string& origin) {
  K3_ASSIGN_OR_RETURN(const nlohmann::json root, parse_strict_json(json, origin));
  if (!root.is_object()) return checkpoint_error(origin, ": not a JSON object");
  const nlohmann::ordered_json body(root);
  GenerationDefaults out;
  Fields fields(body);
  fields.number("temperature", 0, 2, &out.temperature);
  fields.number("top_p", 1e-9, 1, &out.top_p);
  int64_t top_k = 0;
  fields.integer("top_k", -1, INT32_MAX, &top_k);
  out.top_k = static_cast<int32_t>(top_k);
  fields.number("min_p", 0, 1, &out.min_p);
  fields.number("repetition_penalty", kMinRepetitionPenalty, kMaxRepetitionPenalty,
                &out.repetition_penalty);
  // The file's other keys are for other programs; only an error in one of ours counts.
  if (fields.failed()) return checkpoint_error(origin, ": ", fields.finish()->message);
  return out;
}

Result<GenerationDefaults> load_generation_defaults(const std::string& model_dir) {
  const std::string path = model_dir + "/generation_config.json";
  std::error_code error;
  if (!std::filesystem::exists(std::filesystem::symlink_status(path, error)))
    return GenerationDefaults{};
  K3_ASSIGN_OR_RETURN(const std::string text, read_text_file(path, 1 << 20));
  return parse_generation_defaults(text, path);
}

}  // namespace k3
