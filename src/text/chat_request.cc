// The prompt-shaping fields of an OpenAI chat body -> ChatRequest.
#include <array>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "text/chat.h"
#include "text/chat_check.h"
#include "text/py_json.h"

namespace k3 {
namespace {

using json = nlohmann::ordered_json;

Status wrong(std::string_view path, const json& value, std::string_view expected) {
  return invalid_argument(path, ": ", describe(&value), ", expected ", expected);
}

// What one source says about thinking; unset where it is silent.
struct ThinkingChoice {
  std::optional<bool> on;
  std::optional<std::string> effort;

  // Lets `other` fill in what this source leaves open.
  void fall_back_to(const ThinkingChoice& other) {
    if (!on) on = other.on;
    if (!effort) effort = other.effort;
  }
};

// "medium" stands in the prompt's fixed text, but K3's own encoder refuses it, as all ports do.
Status read_effort(const json& value, std::string_view path, bool allow_none,
                   ThinkingChoice* choice) {
  if (value.is_string()) {
    const std::string& effort = value.get_ref<const std::string&>();
    if (effort == "low" || effort == "high" || effort == "max") {
      choice->effort = effort;
      if (!choice->on) choice->on = true;
      return {};
    }
    if (allow_none && effort == "none") {
      if (!choice->on) choice->on = false;
      return {};
    }
  }
  return wrong(
      path, value,
      allow_none ? "\"none\", \"low\", \"high\" or \"max\"" : "\"low\", \"high\" or \"max\"");
}

Status read_thinking(const json& value, ThinkingChoice* choice) {
  if (value.is_boolean()) {
    choice->on = value.get<bool>();
    return {};
  }
  if (!value.is_object()) return wrong("thinking", value, "true, false or an object");
  for (auto it = value.begin(); it != value.end(); ++it) {
    if (it.key() != "type" && it.key() != "effort" && it.key() != "keep") {
      return invalid_argument("thinking: unknown member ", json_quoted(it.key()),
                              ", expected type, effort or keep");
    }
  }
  if (const json* type = find_member(value, "type")) {
    if (*type == "enabled") {
      choice->on = true;
    } else if (*type == "disabled") {
      choice->on = false;
    } else {
      return wrong("thinking.type", *type, "\"enabled\" or \"disabled\"");
    }
  }
  if (const json* keep = find_member(value, "keep"); keep != nullptr && *keep != "all") {
    return wrong("thinking.keep", *keep, "\"all\" (earlier reasoning stays in the prompt)");
  }
  if (const json* effort = find_member(value, "effort")) {
    return read_effort(*effort, "thinking.effort", /*allow_none=*/false, choice);
  }
  return {};
}

Status read_template_kwargs(const json& kwargs, ThinkingChoice* choice) {
  constexpr std::string_view kPath = "chat_template_kwargs";
  if (!kwargs.is_object()) return wrong(kPath, kwargs, "an object");
  const json* effort = nullptr;
  std::string effort_path;
  for (auto it = kwargs.begin(); it != kwargs.end(); ++it) {
    const std::string path = cat(kPath, ".", it.key());
    const json& value = it.value();
    const bool is_switch = it.key() == "thinking" || it.key() == "enable_thinking";
    if (!is_switch && it.key() != "thinking_effort" && it.key() != "reasoning_effort") {
      return invalid_argument(
          kPath, ": unknown member ", json_quoted(it.key()),
          ", expected thinking, enable_thinking, thinking_effort or reasoning_effort");
    }
    if (value.is_null()) continue;
    if (!is_switch) {
      if (effort != nullptr && *effort != value) {
        return invalid_argument(path, ": ", describe(&value), " contradicts ", effort_path, " ",
                                describe(effort));
      }
      effort = &value;
      effort_path = path;
      continue;
    }
    if (!value.is_boolean()) return wrong(path, value, "true or false");
    if (choice->on && *choice->on != value.get<bool>()) {
      return invalid_argument(kPath, ": thinking and enable_thinking contradict each other");
    }
    choice->on = value.get<bool>();
  }
  if (effort == nullptr) return {};
  return read_effort(*effort, effort_path, /*allow_none=*/true, choice);
}

Result<ToolChoice> read_tool_choice(const json& value) {
  if (value.is_object()) {
    const json* function = find_member(value, "function");
    const json* name =
        function != nullptr && function->is_object() ? find_member(*function, "name") : nullptr;
    return invalid_argument("tool_choice: a named function",
                            name != nullptr ? cat(" (", describe(name), ")") : std::string(),
                            " is not supported, expected \"auto\", \"none\" or \"required\"");
  }
  if (value == "auto") return ToolChoice::kAuto;
  if (value == "none") return ToolChoice::kNone;
  if (value == "required") return ToolChoice::kRequired;
  return wrong("tool_choice", value, "\"auto\", \"none\" or \"required\"");
}

// Copies a member; its depth is checked first because copying recurses.
Status copy_member(const json& body, std::string_view key, std::shared_ptr<const json>* out) {
  const json* value = find_member(body, key);
  if (value == nullptr) return {};
  if (!json_depth_ok(*value)) {
    return invalid_argument(key, ": nested deeper than ", kMaxJsonDepth, " levels");
  }
  *out = std::make_shared<const json>(*value);
  return {};
}

}  // namespace

Result<ChatRequest> parse_chat_request(const json& body) {
  if (!body.is_object()) {
    return invalid_argument("request body: ", body.type_name(), ", expected an object");
  }
  ChatRequest request;
  K3_RETURN_IF_ERROR(copy_member(body, "messages", &request.messages));
  K3_RETURN_IF_ERROR(copy_member(body, "tools", &request.tools));
  K3_RETURN_IF_ERROR(copy_member(body, "response_format", &request.response_format));

  const json* tool_choice = find_member(body, "tool_choice");
  if (tool_choice != nullptr) {
    K3_ASSIGN_OR_RETURN(request.tool_choice, read_tool_choice(*tool_choice));
  }

  // The most specific source wins: thinking, then chat_template_kwargs, then reasoning_effort.
  ThinkingChoice choice;
  if (const json* thinking = find_member(body, "thinking")) {
    K3_RETURN_IF_ERROR(read_thinking(*thinking, &choice));
  }
  if (const json* kwargs = find_member(body, "chat_template_kwargs")) {
    ThinkingChoice other;
    K3_RETURN_IF_ERROR(read_template_kwargs(*kwargs, &other));
    choice.fall_back_to(other);
  }
  if (const json* effort = find_member(body, "reasoning_effort")) {
    ThinkingChoice other;
    K3_RETURN_IF_ERROR(read_effort(*effort, "reasoning_effort", /*allow_none=*/true, &other));
    choice.fall_back_to(other);
  }
  request.thinking = choice.on.value_or(true);
  request.thinking_effort = choice.effort.value_or("max");

  if (const json* add = find_member(body, "add_generation_prompt")) {
    if (!add->is_boolean()) return wrong("add_generation_prompt", *add, "true or false");
    request.add_generation_prompt = add->get<bool>();
  }

  K3_RETURN_IF_ERROR(check_chat_request(request));
  if (tool_choice != nullptr && request.tools != nullptr && request.tools->empty()) {
    return invalid_argument("tools: empty with tool_choice ", describe(tool_choice),
                            ", expected at least one tool");
  }
  return request;
}

}  // namespace k3
