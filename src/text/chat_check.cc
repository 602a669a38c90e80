#include "text/chat_check.h"

#include <algorithm>
#include <initializer_list>
#include <set>
#include <string>

#include "text/py_json.h"
#include "text/utf8.h"

namespace k3 {
namespace {

using json = nlohmann::ordered_json;
using Names = std::set<std::string, std::less<>>;

Status wrong(const std::string& path, const json* value, std::string_view expected) {
  return invalid_argument(path, ": ", describe(value), ", expected ", expected);
}

const std::string* as_string(const json* value) {
  return value != nullptr && value->is_string() ? &value->get_ref<const std::string&>() : nullptr;
}
bool is_text(const json* value, std::string_view text) {
  const std::string* s = as_string(value);
  return s != nullptr && *s == text;
}

Status check_optional_string(const json& object, std::string_view key, const std::string& path) {
  const json* value = find_member(object, key);
  if (value == nullptr || value->is_string()) return {};
  return wrong(cat(path, ".", key), value, "a string");
}

// A member that nothing here reads is refused by name; null is the same as absent.
Status check_members(const json& object, const std::string& path,
                     std::initializer_list<std::string_view> known) {
  for (auto it = object.begin(); it != object.end(); ++it) {
    if (it.value().is_null() || std::find(known.begin(), known.end(), it.key()) != known.end()) {
      continue;
    }
    std::string names;
    for (const std::string_view name : known) names += cat(names.empty() ? "" : ", ", name);
    return invalid_argument(path, ".", it.key(), ": not supported, expected one of ", names);
  }
  return {};
}

// A string, or text parts. *empty says whether there is any text in it.
Status check_content(const json& content, const std::string& path, bool* empty) {
  *empty = true;
  if (content.is_string()) {
    *empty = content.get_ref<const std::string&>().empty();
    return {};
  }
  if (!content.is_array()) return wrong(path, &content, "a string or an array of text parts");
  for (size_t i = 0; i < content.size(); ++i) {
    const json& part = content[i];
    const std::string part_path = cat(path, "[", i, "]");
    if (!part.is_object()) return wrong(part_path, &part, "an object with `type` and `text`");
    const json* type = find_member(part, "type");
    if (!is_text(type, "text")) {
      const std::string* name = as_string(type);
      if (name != nullptr && name->find("image") != std::string::npos) {
        return invalid_argument(part_path, ".type: ", describe(type),
                                ": images are not supported, expected \"text\"");
      }
      return wrong(part_path + ".type", type, "\"text\" (other kinds are not supported)");
    }
    K3_RETURN_IF_ERROR(check_members(part, part_path, {"type", "text"}));
    const json* text = find_member(part, "text");
    if (as_string(text) == nullptr) return wrong(part_path + ".text", text, "a string");
    if (!as_string(text)->empty()) *empty = false;
  }
  return {};
}

Status check_tools(const json& tools, const std::string& path, Names* names) {
  if (!tools.is_array()) return wrong(path, &tools, "an array of tools");
  for (size_t i = 0; i < tools.size(); ++i) {
    const json& tool = tools[i];
    const std::string tool_path = cat(path, "[", i, "]");
    if (!tool.is_object()) return wrong(tool_path, &tool, "an object");
    const json* type = find_member(tool, "type");
    if (!is_text(type, "function")) return wrong(tool_path + ".type", type, "\"function\"");
    const json* function = find_member(tool, "function");
    const std::string function_path = tool_path + ".function";
    if (function == nullptr || !function->is_object()) {
      return wrong(function_path, function, "an object");
    }
    const json* name = find_member(*function, "name");
    if (as_string(name) == nullptr || as_string(name)->empty()) {
      return wrong(function_path + ".name", name, "a non-empty string");
    }
    K3_RETURN_IF_ERROR(check_optional_string(*function, "description", function_path));
    const json* parameters = find_member(*function, "parameters");
    if (parameters != nullptr && !parameters->is_object()) {
      return wrong(function_path + ".parameters", parameters, "a JSON Schema object");
    }
    const json* strict = find_member(*function, "strict");
    if (strict != nullptr && !strict->is_boolean()) {
      return wrong(function_path + ".strict", strict, "true or false");
    }
    if (!names->insert(*as_string(name)).second) {
      return invalid_argument(function_path, ".name: ", describe(name),
                              " is declared more than once, expected distinct names");
    }
  }
  return {};
}

Status check_tool_calls(const json& calls, const std::string& path) {
  if (!calls.is_array()) return wrong(path, &calls, "an array");
  for (size_t i = 0; i < calls.size(); ++i) {
    const json& call = calls[i];
    const std::string call_path = cat(path, "[", i, "]");
    if (!call.is_object()) return wrong(call_path, &call, "an object");
    const json* type = find_member(call, "type");
    if (type != nullptr && !is_text(type, "function")) {
      return wrong(call_path + ".type", type, "\"function\"");
    }
    K3_RETURN_IF_ERROR(check_optional_string(call, "id", call_path));
    const json* function = find_member(call, "function");
    const std::string function_path = call_path + ".function";
    if (function == nullptr || !function->is_object()) {
      return wrong(function_path, function, "an object");
    }
    const json* name = find_member(*function, "name");
    if (as_string(name) == nullptr || as_string(name)->empty()) {
      return wrong(function_path + ".name", name, "a non-empty string");
    }
    const json* arguments = find_member(*function, "arguments");
    if (arguments != nullptr && !arguments->is_string() && !arguments->is_object()) {
      return wrong(function_path + ".arguments", arguments, "a string of JSON or an object");
    }
  }
  return {};
}

Status check_message(const json& message, const std::string& path, Names* tool_names) {
  if (!message.is_object()) return wrong(path, &message, "an object");
  const json* role_value = find_member(message, "role");
  const std::string* role = as_string(role_value);
  const bool system = role != nullptr && (*role == "system" || *role == "developer");
  const bool assistant = role != nullptr && *role == "assistant";
  const bool tool = role != nullptr && *role == "tool";
  if (!system && !assistant && !tool && (role == nullptr || *role != "user")) {
    return wrong(path + ".role", role_value, "system, developer, user, assistant or tool");
  }
  K3_RETURN_IF_ERROR(check_optional_string(message, "name", path));

  const json* tools = find_member(message, "tools");
  if (tools != nullptr) {
    if (!system) {
      return invalid_argument(path, ".tools: not allowed with role ", *role,
                              ", expected in a system message or at the top level");
    }
    K3_RETURN_IF_ERROR(check_tools(*tools, path + ".tools", tool_names));
  }

  const json* content = find_member(message, "content");
  bool empty = true;
  if (content != nullptr) {
    K3_RETURN_IF_ERROR(check_content(*content, path + ".content", &empty));
  } else if (!assistant && !declares_tools(message)) {
    return invalid_argument(path, ".content: missing, expected a string or an array of text parts");
  }
  if (declares_tools(message) && !empty) {
    return invalid_argument(path,
                            ".content: not empty, expected none in a message that declares tools");
  }

  const json* calls = find_member(message, "tool_calls");
  if (calls != nullptr) {
    if (!assistant) {
      return invalid_argument(path, ".tool_calls: not allowed with role ", *role,
                              ", expected in an assistant message");
    }
    K3_RETURN_IF_ERROR(check_tool_calls(*calls, path + ".tool_calls"));
  }
  if (find_member(message, "function_call") != nullptr) {
    return invalid_argument(path, ".function_call: not supported, expected `tool_calls`");
  }
  if (assistant) {
    K3_RETURN_IF_ERROR(check_optional_string(message, "reasoning_content", path));
    K3_RETURN_IF_ERROR(check_optional_string(message, "reasoning", path));
    K3_RETURN_IF_ERROR(
        check_members(message, path,
                      {"role", "content", "name", "tool_calls", "reasoning_content", "reasoning"}));
  } else if (tool) {
    K3_RETURN_IF_ERROR(
        check_members(message, path, {"role", "content", "name", "tool", "tool_call_id"}));
  } else if (system) {
    K3_RETURN_IF_ERROR(check_members(message, path, {"role", "content", "name", "tools"}));
  } else {
    K3_RETURN_IF_ERROR(check_members(message, path, {"role", "content", "name"}));
  }
  if (tool) {
    const json* id = find_member(message, "tool_call_id");
    if (as_string(id) == nullptr || as_string(id)->empty()) {
      return wrong(path + ".tool_call_id", id, "the id of the call this is the result of");
    }
  }
  return {};
}

Status check_response_format(const json& format) {
  const std::string path = "response_format";
  if (!format.is_object()) return wrong(path, &format, "an object");
  const json* type = find_member(format, "type");
  if (is_text(type, "text") || is_text(type, "json_object")) return {};
  if (!is_text(type, "json_schema")) {
    return wrong(path + ".type", type, "\"text\", \"json_object\" or \"json_schema\"");
  }
  const json* schema = find_member(format, "json_schema");
  if (schema == nullptr || !schema->is_object()) {
    return wrong(path + ".json_schema", schema, "an object with `name` and `schema`");
  }
  const json* name = find_member(*schema, "name");
  if (as_string(name) == nullptr || as_string(name)->empty()) {
    return wrong(path + ".json_schema.name", name, "a non-empty string");
  }
  const json* body = find_member(*schema, "schema");
  if (body == nullptr || !body->is_object()) {
    return wrong(path + ".json_schema.schema", body, "a JSON Schema object");
  }
  const json* strict = find_member(*schema, "strict");
  if (strict != nullptr && !strict->is_boolean()) {
    return wrong(path + ".json_schema.strict", strict, "true or false");
  }
  return check_optional_string(*schema, "description", path + ".json_schema");
}

Status check_depth(const json* value, std::string_view path) {
  if (value == nullptr || json_depth_ok(*value)) return {};
  return invalid_argument(path, ": nested deeper than ", kMaxJsonDepth, " levels");
}

}  // namespace

std::string describe(const json* value) {
  if (value == nullptr) return "missing";
  if (!value->is_string()) return value->type_name();
  std::string_view text = value->get_ref<const std::string&>();
  constexpr size_t kMax = 60;
  if (text.size() <= kMax) return json_quoted(text);
  size_t cut = kMax;
  while (cut > 0 && (static_cast<unsigned char>(text[cut]) & 0xc0) == 0x80) --cut;
  std::string out = json_quoted(text.substr(0, cut));
  out.insert(out.size() - 1, "...");
  return out;
}

const json* find_member(const json& object, std::string_view key) {
  const auto found = object.find(key);
  return found == object.end() || found->is_null() ? nullptr : &*found;
}

bool declares_tools(const json& message) {
  const json* tools = find_member(message, "tools");
  return tools != nullptr && tools->is_array() && !tools->empty();
}

Status check_chat_request(const ChatRequest& request) {
  K3_RETURN_IF_ERROR(check_depth(request.messages.get(), "messages"));
  K3_RETURN_IF_ERROR(check_depth(request.tools.get(), "tools"));
  K3_RETURN_IF_ERROR(check_depth(request.response_format.get(), "response_format"));
  if (request.messages == nullptr || !request.messages->is_array()) {
    return wrong("messages", request.messages.get(), "an array of messages");
  }
  if (request.messages->empty()) {
    return invalid_argument("messages: empty, expected at least one message");
  }
  Names names;
  const bool has_tools = request.tools != nullptr && !request.tools->is_null();
  if (has_tools) K3_RETURN_IF_ERROR(check_tools(*request.tools, "tools", &names));
  for (size_t i = 0; i < request.messages->size(); ++i) {
    K3_RETURN_IF_ERROR(check_message((*request.messages)[i], cat("messages[", i, "]"), &names));
  }
  if (request.response_format != nullptr && !request.response_format->is_null()) {
    K3_RETURN_IF_ERROR(check_response_format(*request.response_format));
  }
  if (request.tool_choice == ToolChoice::kRequired && names.empty()) {
    return invalid_argument("tool_choice: \"required\" without tools, expected `tools`");
  }
  const std::string& effort = request.thinking_effort;
  if (effort != "low" && effort != "high" && effort != "max") {
    return invalid_argument("thinking effort: ", json_quoted(effort),
                            ", expected \"low\", \"high\" or \"max\"");
  }
  return {};
}

}  // namespace k3
