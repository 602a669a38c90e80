// K3's prompt markup: a chat request becomes token ids, segment by segment, so that user text never
// becomes a control token (docs/text.md#chat). There is no template language: the format is code.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "core/status.h"
#include "text/tokenizer.h"

namespace k3 {

enum class ToolChoice { kAuto, kNone, kRequired };

// A chat request reduced to what the prompt depends on. Messages, tools and response_format stay in
// the OpenAI JSON form they arrived in (member order kept: it is the order of rendered arguments).
struct ChatRequest {
  std::shared_ptr<const nlohmann::ordered_json> messages;         // array
  std::shared_ptr<const nlohmann::ordered_json> tools;            // array or null
  std::shared_ptr<const nlohmann::ordered_json> response_format;  // object or null
  ToolChoice tool_choice = ToolChoice::kAuto;
  bool thinking = true;
  std::string thinking_effort = "max";  // low | high | max (as K3's own encoder accepts)
  bool add_generation_prompt = true;
};

// Reads the prompt-shaping fields of an OpenAI chat body: messages, tools, tool_choice,
// response_format, thinking (bool or {"type"/"effort"/"keep"}), reasoning_effort,
// chat_template_kwargs{thinking, enable_thinking, thinking_effort}, add_generation_prompt. Other
// members are the caller's business. kInvalidArgument names the field, e.g. `messages[2].role`.
Result<ChatRequest> parse_chat_request(const nlohmann::ordered_json& body);

// Token ids of the whole prompt. kInvalidArgument for what K3 cannot express (a tool result whose
// call is unknown, arguments that are JSON but not an object, ...), naming the message.
Result<std::vector<int32_t>> render_chat(const ChatRequest& request, const Tokenizer& tokenizer);

// The same prompt as one string, for people to read (`k3 chat --show-prompt`, logs at debug).
Result<std::string> render_chat_text(const ChatRequest& request);

}  // namespace k3
