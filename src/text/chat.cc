// K3's prompt markup (docs/text.md#chat). One walk over the request writes to either of two sinks:
// token ids, where every segment is encoded by itself, or text for people.
#include "text/chat.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "text/chat_check.h"
#include "text/py_json.h"

namespace k3 {
namespace {

using json = nlohmann::ordered_json;

enum class Control { kOpen, kClose, kSep, kEndOfMsg };

// Where a prompt goes. A segment is a stretch of text that is encoded on its own: where the model
// saw a border in training, no byte pair is merged across it.
class PromptSink {
 public:
  virtual ~PromptSink() = default;
  virtual void control(Control which) = 0;
  virtual void segment(std::string_view text) = 0;
};

class IdSink : public PromptSink {
 public:
  explicit IdSink(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {}
  void control(Control which) override {
    const Tokenizer::Markup& m = tokenizer_.markup();
    switch (which) {
      case Control::kOpen:
        return ids.push_back(m.open);
      case Control::kClose:
        return ids.push_back(m.close);
      case Control::kSep:
        return ids.push_back(m.sep);
      case Control::kEndOfMsg:
        return ids.push_back(m.end_of_msg);
    }
  }
  void segment(std::string_view text) override { tokenizer_.encode_append(text, &ids); }

  std::vector<int32_t> ids;

 private:
  const Tokenizer& tokenizer_;
};

class TextSink : public PromptSink {
 public:
  void control(Control which) override {
    switch (which) {
      case Control::kOpen:
        text += "<|open|>";
        break;
      case Control::kClose:
        text += "<|close|>";
        break;
      case Control::kSep:
        text += "<|sep|>";
        break;
      case Control::kEndOfMsg:
        text += "<|end_of_msg|>";
        break;
    }
  }
  void segment(std::string_view piece) override { text += piece; }

  std::string text;
};

// The texts K3 was trained on, byte for byte.
constexpr std::string_view kToolsHeading =
    "# Tools\n"
    "Here are the available tools, described in JSONSchema.\n\n";
constexpr std::string_view kMoreToolsHeading =
    "## New Tools Available\n"
    "The system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\n"
    "Here are the specs for the extended tools.\n\n";
constexpr std::string_view kEffortText =
    "`thinking_effort` guides on how much to think in your thinking channel (not including the "
    "response channel), supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort=";
constexpr std::string_view kRequiredText =
    "The system is invoked with `tool_choice=required`.\n"
    "You MUST call tools in the next message.";
constexpr std::string_view kNoneText =
    "The system is invoked with `tool_choice=none`.\n"
    "You MUST NOT call any tools in the next message.";
constexpr std::string_view kJsonRule =
    "`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional "
    "formatting.";
constexpr std::string_view kSchemaText =
    "\nThe JSON data must match the following schema:\n```json\n";

using Attributes = std::vector<std::pair<std::string_view, std::string_view>>;

std::string escape_attribute(std::string_view value) {
  std::string out;
  for (const char c : value) {
    if (c == '&') {
      out += "&amp;";
    } else if (c == '"') {
      out += "&quot;";
    } else {
      out += c;
    }
  }
  return out;
}

const std::string* string_member(const json& object, std::string_view key) {
  const json* value = find_member(object, key);
  return value != nullptr && value->is_string() ? &value->get_ref<const std::string&>() : nullptr;
}
std::string_view text_member(const json& object, std::string_view key) {
  const std::string* text = string_member(object, key);
  return text == nullptr ? std::string_view() : std::string_view(*text);
}

class Renderer {
 public:
  Renderer(const ChatRequest& request, PromptSink* sink) : request_(request), sink_(*sink) {}

  Status render() {
    if (request_.tools != nullptr && request_.tools->is_array() && !request_.tools->empty()) {
      system_message("tool-declare", declaration(*request_.tools, kToolsHeading));
    }
    if (request_.thinking) {
      system_message("thinking-effort", cat(kEffortText, request_.thinking_effort, "`."));
    }
    const json& messages = *request_.messages;
    for (size_t i = 0; i < messages.size();) {
      const std::string_view role = text_member(messages[i], "role");
      if (role == "tool") {
        size_t end = i + 1;
        while (end < messages.size() && text_member(messages[end], "role") == "tool") ++end;
        K3_RETURN_IF_ERROR(tool_results(i, end));
        i = end;
        continue;
      }
      if (role == "assistant") {
        K3_RETURN_IF_ERROR(assistant_message(i));
      } else if (role == "user") {
        plain_message("user", messages[i]);
      } else if (declares_tools(messages[i])) {
        system_message("tool-declare",
                       declaration(*find_member(messages[i], "tools"), kMoreToolsHeading));
      } else {
        plain_message("system", messages[i]);  // "developer" is OpenAI's newer word for it
      }
      ++i;
    }
    if (request_.tool_choice == ToolChoice::kRequired) system_message("tool-choice", kRequiredText);
    if (request_.tool_choice == ToolChoice::kNone) system_message("tool-choice", kNoneText);
    response_format();
    if (request_.add_generation_prompt) {
      open("message", {{"role", "assistant"}});
      open(request_.thinking ? "think" : "response");
    }
    return {};
  }

 private:
  void open(std::string_view tag, const Attributes& attributes = {}) {
    sink_.control(Control::kOpen);
    sink_.segment(tag);
    for (const auto& [key, value] : attributes) {
      sink_.segment(cat(" ", key));
      sink_.segment("=\"");
      sink_.segment(escape_attribute(value));
      sink_.segment("\"");
    }
    sink_.control(Control::kSep);
  }
  void close(std::string_view tag) {
    sink_.control(Control::kClose);
    sink_.segment(tag);
    sink_.control(Control::kSep);
  }
  void end_message() {
    close("message");
    sink_.control(Control::kEndOfMsg);
  }

  void system_message(std::string_view type, std::string_view body) {
    open("message", {{"role", "system"}, {"type", type}});
    sink_.segment(body);
    end_message();
  }
  static std::string declaration(const json& tools, std::string_view heading) {
    return cat(heading, "```json\n", py_json_dumps(tools, JsonStyle::kCompactSorted), "\n```");
  }

  void open_message(std::string_view role, const json& message) {
    Attributes attributes = {{"role", role}};
    const std::string_view name = text_member(message, "name");
    if (!name.empty()) attributes.emplace_back("name", name);
    open("message", attributes);
  }
  // Parts follow each other with nothing between, each a segment of its own.
  void content(const json& message) {
    const json* value = find_member(message, "content");
    if (value == nullptr) return;
    if (value->is_string()) {
      sink_.segment(value->get_ref<const std::string&>());
      return;
    }
    for (const json& part : *value) sink_.segment(text_member(part, "text"));
  }
  void plain_message(std::string_view role, const json& message) {
    open_message(role, message);
    content(message);
    end_message();
  }

  Status assistant_message(size_t index) {
    const json& message = (*request_.messages)[index];
    calls_ = find_member(message, "tool_calls");
    results_ = 0;
    open_message("assistant", message);
    if (request_.thinking) {
      // A history keeps its reasoning: the model was trained to see it.
      std::string_view reasoning = text_member(message, "reasoning_content");
      if (reasoning.empty()) reasoning = text_member(message, "reasoning");
      open("think");
      if (reasoning.find_first_not_of(" \t\n\v\f\r") != std::string_view::npos) {
        sink_.segment(reasoning);
      }
      close("think");
    }
    open("response");
    content(message);
    close("response");
    if (calls_ != nullptr && !calls_->empty()) {
      open("tools");
      for (size_t i = 0; i < calls_->size(); ++i) {
        const json& function = *find_member((*calls_)[i], "function");
        open("call", {{"tool", text_member(function, "name")}, {"index", std::to_string(i + 1)}});
        K3_RETURN_IF_ERROR(
            arguments(find_member(function, "arguments"),
                      cat("messages[", index, "].tool_calls[", i, "].function.arguments")));
        close("call");
      }
      close("tools");
    }
    end_message();
    return {};
  }

  Status arguments(const json* value, const std::string& path) {
    if (value == nullptr) return {};
    ParsedJson parsed;
    if (value->is_string()) {
      const std::string& text = value->get_ref<const std::string&>();
      if (text.find_first_not_of(" \t\r\n") == std::string::npos) return {};
      parsed = py_json_loads(text);
      if (parsed.kind == ParsedJson::Kind::kTooDeep) {
        return invalid_argument(path, ": nested deeper than ", kMaxJsonDepth, " levels");
      }
      if (parsed.kind == ParsedJson::Kind::kNotJson) {
        // What the model once wrote wrongly is shown to it as it was.
        open("json", {{"type", "object"}});
        sink_.segment(text);
        close("json");
        return {};
      }
      value = &parsed.value;
    }
    if (!value->is_object()) {
      return invalid_argument(path, ": JSON ", value->type_name(), ", expected a JSON object");
    }
    for (auto it = value->begin(); it != value->end(); ++it) {
      const json& v = it.value();
      open("argument", {{"key", it.key()}, {"type", type_of(v)}});
      sink_.segment(v.is_string() ? v.get_ref<const std::string&>()
                                  : py_json_dumps(v, JsonStyle::kPlain));
      close("argument");
    }
    return {};
  }
  static std::string_view type_of(const json& value) {
    switch (value.type()) {
      case json::value_t::string:
        return "string";
      case json::value_t::boolean:
        return "boolean";
      case json::value_t::null:
        return "null";
      case json::value_t::object:
        return "object";
      case json::value_t::array:
        return "array";
      default:
        return "number";
    }
  }

  // A run of tool results. When every id names a call of the last assistant message, results are
  // put in the order of the calls; else they stay as they are and are named by their own `tool` or
  // `name`, or by the call at their position.
  Status tool_results(size_t begin, size_t end) {
    std::unordered_map<std::string_view, size_t> call_of_id;
    if (calls_ != nullptr) {
      for (size_t i = 0; i < calls_->size(); ++i) {
        const std::string* id = string_member((*calls_)[i], "id");
        if (id != nullptr) call_of_id.emplace(*id, i);  // of equal ids the first counts
      }
    }
    constexpr size_t kUnknown = SIZE_MAX;
    std::vector<std::pair<size_t, size_t>> run;  // call, message
    bool all_known = true;
    for (size_t i = begin; i < end; ++i) {
      const auto found = call_of_id.find(text_member((*request_.messages)[i], "tool_call_id"));
      all_known = all_known && found != call_of_id.end();
      run.emplace_back(found == call_of_id.end() ? kUnknown : found->second, i);
    }
    if (all_known) std::sort(run.begin(), run.end());
    for (const auto& [call, index] : run) {
      const json& message = (*request_.messages)[index];
      const size_t position = results_++;
      std::string_view name;
      if (all_known) {
        name = call_name(call);
      } else {
        name = text_member(message, "tool");
        if (name.empty()) name = text_member(message, "name");
        if (name.empty() && calls_ != nullptr && position < calls_->size()) {
          name = call_name(position);
        }
      }
      if (name.empty()) {
        return invalid_argument(
            "messages[", index,
            "].tool_call_id: ", json_quoted(text_member(message, "tool_call_id")),
            ", expected the id of a call in the assistant message before it, or a `name`");
      }
      open("message", {{"role", "tool"}, {"tool", name}, {"index", std::to_string(position + 1)}});
      content(message);
      end_message();
    }
    return {};
  }
  std::string_view call_name(size_t call) const {
    return text_member(*find_member((*calls_)[call], "function"), "name");
  }

  void response_format() {
    if (request_.response_format == nullptr || request_.response_format->is_null()) return;
    const std::string_view type = text_member(*request_.response_format, "type");
    if (type == "text") return;
    std::string body = cat("The system is invoked with `response_format=", type, kJsonRule);
    if (type == "json_schema") {
      const json& schema =
          *find_member(*find_member(*request_.response_format, "json_schema"), "schema");
      body += cat(kSchemaText, py_json_dumps(schema, JsonStyle::kCompactSorted), "\n```");
    }
    system_message("response-format", body);
  }

  const ChatRequest& request_;
  PromptSink& sink_;
  const json* calls_ = nullptr;  // of the last assistant message
  size_t results_ = 0;           // tool results since then
};

}  // namespace

Result<std::vector<int32_t>> render_chat(const ChatRequest& request, const Tokenizer& tokenizer) {
  const Tokenizer::Markup& m = tokenizer.markup();
  if (m.open < 0 || m.close < 0 || m.sep < 0 || m.end_of_msg < 0) {
    return invalid_argument(
        "chat: tokenizer_config.json names no <|open|>, <|close|>, <|sep|> or <|end_of_msg|>, "
        "expected K3's special tokens (plain completions work)");
  }
  K3_RETURN_IF_ERROR(check_chat_request(request));
  IdSink sink(tokenizer);
  K3_RETURN_IF_ERROR(Renderer(request, &sink).render());
  return std::move(sink.ids);
}

Result<std::string> render_chat_text(const ChatRequest& request) {
  K3_RETURN_IF_ERROR(check_chat_request(request));
  TextSink sink;
  K3_RETURN_IF_ERROR(Renderer(request, &sink).render());
  return std::move(sink.text);
}

}  // namespace k3
