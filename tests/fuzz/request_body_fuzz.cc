// Any bytes as the body of each endpoint: refused with an error that can be sent, or parsed into
// values inside the limits that the schema states.
#include <cstdint>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>

#include "server/json_body.h"
#include "server/schema.h"

namespace {

void require(bool ok) {
  if (!ok) std::abort();
}

// True if there is an error; it must be one a client can read.
bool refused(const std::optional<k3::ApiError>& error) {
  if (!error) return false;
  require(error->http_status >= 400 && error->http_status < 500 && !error->message.empty());
  (void)nlohmann::json(error->message).dump();  // valid UTF-8, or this throws
  (void)nlohmann::json(error->param).dump();
  return true;
}

void check_common(const k3::GenerationFields& g) {
  require(g.n >= 1 && g.n <= k3::kMaxN && g.stop.size() <= k3::kMaxStopStrings);
  require(!g.max_tokens || *g.max_tokens >= 1);
  require(g.sampling.temperature >= 0 && g.sampling.top_p > 0 && g.sampling.top_p <= 1);
  for (const auto& s : g.stop) require(!s.empty());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view text(reinterpret_cast<const char*>(data) + 1, size - 1);
  nlohmann::ordered_json body;
  if (refused(k3::parse_json_body(text, &body))) return 0;
  const k3::SchemaContext context{2048, {}};
  switch (data[0] % 4) {
    case 0: {
      k3::CompletionBody out;
      if (refused(k3::parse_completion_body(body, context, &out))) return 0;
      check_common(out.common);
      require(!out.prompts.empty());
      for (const auto& prompt : out.prompts) {
        if (const auto* ids = std::get_if<std::vector<int32_t>>(&prompt)) {
          require(!ids->empty());
          for (const int32_t id : *ids) require(id >= 0 && id < context.vocab_size);
        }
      }
      return 0;
    }
    case 1: {
      k3::ChatBody out;
      if (!refused(k3::parse_chat_body(body, context, &out))) check_common(out.common);
      return 0;
    }
    case 2: {
      k3::TokenizeBody out;
      (void)refused(k3::parse_tokenize_body(body, &out));
      return 0;
    }
    default: {
      k3::DetokenizeBody out;
      if (refused(k3::parse_detokenize_body(body, context, &out))) return 0;
      for (const int32_t id : out.tokens) require(id >= 0 && id < context.vocab_size);
      return 0;
    }
  }
}
