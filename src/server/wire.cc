#include "server/wire.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <random>

namespace k3 {
namespace {

using Json = nlohmann::ordered_json;

// JSON has no -infinity; vLLM and OpenAI say -9999.
double finite_logprob(float v) { return v > -9999.0f ? static_cast<double>(v) : -9999.0; }

Json bytes_of(std::string_view bytes) {
  Json array = Json::array();
  for (char c : bytes) array.push_back(static_cast<unsigned char>(c));
  return array;
}

Json chat_logprobs(const Tokenizer& tokenizer, const std::vector<LogprobEntry>& entries) {
  auto one = [&](const LogprobEntry::Candidate& c) {
    Json item;
    item["token"] = token_text(tokenizer, c.token);
    item["logprob"] = finite_logprob(c.logprob);
    item["bytes"] = bytes_of(tokenizer.token_bytes(c.token));
    return item;
  };
  Json content = Json::array();
  for (const LogprobEntry& entry : entries) {
    Json item = one(entry.chosen);
    item["top_logprobs"] = Json::array();
    for (const auto& candidate : entry.top) item["top_logprobs"].push_back(one(candidate));
    content.push_back(std::move(item));
  }
  Json out;
  out["content"] = std::move(content);
  return out;
}

Json completion_logprobs(const Tokenizer& tokenizer, const std::vector<LogprobEntry>& entries) {
  Json out;
  Json& tokens = out["tokens"] = Json::array();
  for (const LogprobEntry& e : entries) tokens.push_back(token_text(tokenizer, e.chosen.token));
  Json& values = out["token_logprobs"] = Json::array();
  for (const LogprobEntry& e : entries) values.push_back(finite_logprob(e.chosen.logprob));
  Json& tops = out["top_logprobs"] = Json::array();
  for (const LogprobEntry& e : entries) {
    Json top = Json::object();
    for (const auto& c : e.top) top[token_text(tokenizer, c.token)] = finite_logprob(c.logprob);
    top[token_text(tokenizer, e.chosen.token)] = finite_logprob(e.chosen.logprob);
    tops.push_back(std::move(top));
  }
  Json& offsets = out["text_offset"] = Json::array();
  for (const LogprobEntry& e : entries) offsets.push_back(e.text_offset);
  return out;
}

Json logprobs_json(const AnswerMeta& meta, const Tokenizer& tokenizer,
                   const std::vector<LogprobEntry>& entries) {
  return meta.chat ? chat_logprobs(tokenizer, entries) : completion_logprobs(tokenizer, entries);
}

Json usage_json(const Usage& usage) {
  Json out;
  out["prompt_tokens"] = usage.prompt_tokens;
  out["completion_tokens"] = usage.completion_tokens;
  out["total_tokens"] = usage.prompt_tokens + usage.completion_tokens;
  out["prompt_tokens_details"]["cached_tokens"] = 0;
  return out;
}

Json head(const AnswerMeta& meta, bool chunk) {
  Json out;
  out["id"] = meta.id;
  out["object"] = !meta.chat ? "text_completion"
                  : chunk    ? "chat.completion.chunk"
                             : "chat.completion";
  out["created"] = meta.created;
  out["model"] = meta.model;
  return out;
}

void add_ending(const Ending& ending, Json* choice) {
  (*choice)["finish_reason"] = ending.finish_reason;
  if (const auto* text = std::get_if<std::string>(&ending.stop_reason)) {
    (*choice)["stop_reason"] = *text;
  } else if (const auto* id = std::get_if<int32_t>(&ending.stop_reason)) {
    (*choice)["stop_reason"] = *id;
  }
}

Json delta_json(const Delta& delta) {
  Json out = Json::object();
  switch (delta.kind) {
    case Delta::Kind::kReasoning:
      out["reasoning_content"] = delta.text;
      break;
    case Delta::Kind::kContent:
      out["content"] = delta.text;
      break;
    case Delta::Kind::kToolCallBegin: {
      Json call;
      call["index"] = delta.index;
      call["id"] = delta.call_id;
      call["type"] = "function";
      call["function"]["name"] = delta.text;
      call["function"]["arguments"] = "";
      out["tool_calls"] = Json::array({std::move(call)});
      break;
    }
    case Delta::Kind::kToolCallArgs: {
      Json call;
      call["index"] = delta.index;
      call["function"]["arguments"] = delta.text;
      out["tool_calls"] = Json::array({std::move(call)});
      break;
    }
  }
  return out;
}

std::string frame(const Json& value) { return "data: " + dump_json(value) + "\n\n"; }

bool valid_utf8(std::string_view bytes) {
  Utf8Stream stream;
  std::string text = stream.push(bytes);
  text += stream.flush();
  return text == bytes;
}

}  // namespace

void ChoiceResult::add(const Delta& delta) {
  switch (delta.kind) {
    case Delta::Kind::kReasoning:
      reasoning += delta.text;
      return;
    case Delta::Kind::kContent:
      content += delta.text;
      return;
    case Delta::Kind::kToolCallBegin:
    case Delta::Kind::kToolCallArgs:
      if (tool_calls.size() <= static_cast<size_t>(delta.index)) {
        tool_calls.resize(static_cast<size_t>(delta.index) + 1);
      }
      ToolCall& call = tool_calls[static_cast<size_t>(delta.index)];
      if (delta.kind == Delta::Kind::kToolCallBegin) {
        call.id = delta.call_id;
        call.name = delta.text;
      } else {
        call.arguments += delta.text;
      }
      return;
  }
}

std::string random_id(const std::string& prefix) {
  thread_local std::mt19937_64 generator{std::random_device{}()};
  std::string out = prefix;
  for (int i = 0; i < 24; i += 8) {
    uint64_t bits = generator();
    for (int k = 0; k < 8; ++k, bits >>= 4) out += "0123456789abcdef"[bits & 15];
  }
  return out;
}

std::string token_text(const Tokenizer& tokenizer, int32_t id) {
  const std::string_view bytes = tokenizer.token_bytes(id);
  if (valid_utf8(bytes)) return std::string(bytes);
  std::string out = "bytes:";
  for (char c : bytes) {
    const auto b = static_cast<unsigned char>(c);
    out += "\\x";
    out += "0123456789abcdef"[b >> 4];
    out += "0123456789abcdef"[b & 15];
  }
  return out;
}

std::string choice_frame(const AnswerMeta& meta, const Tokenizer& tokenizer,
                         const FrameParts& parts) {
  Json out = head(meta, true);
  Json choice;
  choice["index"] = parts.index;
  if (meta.chat) {
    Json delta = parts.delta != nullptr ? delta_json(*parts.delta) : Json::object();
    if (parts.role) delta["role"] = "assistant";
    choice["delta"] = std::move(delta);
  } else {
    choice["text"] = parts.delta != nullptr ? parts.delta->text : "";
  }
  if (parts.logprobs != nullptr && !parts.logprobs->empty()) {
    choice["logprobs"] = logprobs_json(meta, tokenizer, *parts.logprobs);
  }
  // OpenAI's clients require this key in every choice, so it is there as null before the end.
  choice["finish_reason"] = nullptr;
  if (parts.ending != nullptr) add_ending(*parts.ending, &choice);
  out["choices"] = Json::array({std::move(choice)});
  if (parts.usage != nullptr) out["usage"] = usage_json(*parts.usage);
  return frame(out);
}

std::string text_frame(const AnswerMeta& meta, int64_t index, const std::string& text) {
  Json out = head(meta, true);
  Json choice;
  choice["index"] = index;
  choice["text"] = text;
  choice["finish_reason"] = nullptr;
  out["choices"] = Json::array({std::move(choice)});
  return frame(out);
}

std::string usage_frame(const AnswerMeta& meta, const Usage& usage) {
  Json out = head(meta, true);
  out["choices"] = Json::array();
  out["usage"] = usage_json(usage);
  return frame(out);
}

std::string error_frame(const ApiError& error) { return "data: " + error_body(error) + "\n\n"; }

std::string answer_body(const AnswerMeta& meta, const Tokenizer& tokenizer, bool logprobs,
                        const std::vector<ChoiceResult>& choices, const Usage& usage) {
  Json out = head(meta, false);
  Json& list = out["choices"] = Json::array();
  for (size_t i = 0; i < choices.size(); ++i) {
    const ChoiceResult& result = choices[i];
    Json choice;
    choice["index"] = i;
    if (meta.chat) {
      Json& message = choice["message"];
      message["role"] = "assistant";
      message["content"] = result.content.empty() ? Json() : Json(result.content);
      if (!result.reasoning.empty()) message["reasoning_content"] = result.reasoning;
      if (!result.tool_calls.empty()) {
        Json& calls = message["tool_calls"] = Json::array();
        for (const auto& c : result.tool_calls) {
          Json call;
          call["id"] = c.id;
          call["type"] = "function";
          call["function"]["name"] = c.name;
          call["function"]["arguments"] = c.arguments;
          calls.push_back(std::move(call));
        }
      }
    } else {
      choice["text"] = result.content;
    }
    choice["logprobs"] = logprobs ? logprobs_json(meta, tokenizer, result.logprobs) : Json();
    add_ending(result.ending, &choice);
    list.push_back(std::move(choice));
  }
  out["usage"] = usage_json(usage);
  return dump_json(out);
}

std::string dump_json(const Json& value) {
  return value.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace k3
