#include "server/schema.h"

#include <cmath>
#include <nlohmann/json.hpp>
#include <unordered_set>

#include "server/fields.h"

namespace k3 {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view kNotSupported = "this server does not support it";
constexpr std::string_view kNoConstraint =
    "this server has no constrained decoding (response_format tells the model the schema)";

void read_model(Fields& fields, std::string* out) {
  if (fields.string("model", out) && out->empty()) {
    fields.fail(bad_field("model", "model: found \"\", expected a served name, or no model"));
  }
}

void read_stop(Fields& fields, GenerationFields* out) {
  const Json* stop = fields.take("stop");
  if (stop == nullptr) return;
  auto add = [&](const Json& item, const std::string& field) {
    if (!item.is_string()) {
      fields.fail(bad_field(field, field, ": found ", shown(item), ", expected a string"));
    } else if (item.get_ref<const std::string&>().empty()) {
      fields.fail(bad_field(field, field, ": found \"\"; an empty string would stop everything"));
    } else {
      out->stop.push_back(item.get<std::string>());
    }
  };
  if (stop->is_array()) {
    if (stop->size() > kMaxStopStrings) {
      fields.fail(bad_field("stop", "stop: found ", stop->size(), " strings, the limit is ",
                            kMaxStopStrings));
      return;
    }
    for (size_t i = 0; i < stop->size(); ++i) add((*stop)[i], cat("stop[", i, "]"));
  } else if (stop->is_string()) {
    add(*stop, "stop");
  } else {
    fields.fail(bad_field("stop", "stop: found ", shown(*stop),
                          ", expected a string or an array of strings"));
  }
}

// An array of token ids in [0, vocab_size).
bool read_ids(Fields& fields, const Json& array, const std::string& name, int64_t vocab_size,
              std::vector<int32_t>* out) {
  out->reserve(array.size());
  for (size_t i = 0; i < array.size(); ++i) {
    int64_t id = 0;
    const Json& item = array[i];
    // The common case without building a name.
    if (item.is_number_unsigned() && item.get<uint64_t>() < static_cast<uint64_t>(vocab_size)) {
      id = item.get<int64_t>();
    } else if (auto error = check_integer(item, cat(name, "[", i, "]"), 0, vocab_size - 1, &id)) {
      fields.fail(std::move(*error));
      return false;
    }
    out->push_back(static_cast<int32_t>(id));
  }
  return true;
}

void read_logit_bias(Fields& fields, int64_t vocab_size, SamplingParams* out) {
  const Json* bias = fields.take("logit_bias");
  if (bias == nullptr) return;
  if (!bias->is_object()) {
    fields.fail(bad_field("logit_bias", "logit_bias: found ", shown(*bias),
                          ", expected an object of token id -> bias"));
    return;
  }
  if (bias->size() > kMaxLogitBias) {
    fields.fail(bad_field("logit_bias", "logit_bias: found ", bias->size(),
                          " entries, the limit is ", kMaxLogitBias));
    return;
  }
  std::unordered_set<int32_t> seen;
  for (const auto& [key, value] : bias->items()) {
    const std::string shown_key = key.substr(0, 24);
    int64_t id = 0;
    bool good = !key.empty() && key.size() <= 9;
    for (char c : key) good = good && c >= '0' && c <= '9';
    if (good) id = std::stoll(key);
    if (!good || id >= vocab_size) {
      fields.fail(bad_field("logit_bias", "logit_bias: found the key \"", shown_key,
                            "\", expected a token id from 0 to ", vocab_size - 1));
      return;
    }
    if (!seen.insert(static_cast<int32_t>(id)).second) {
      fields.fail(bad_field("logit_bias", "logit_bias: token ", id, " is given twice"));
      return;
    }
    if (!value.is_number() || !(std::abs(value.get<double>()) <= 100.0)) {
      fields.fail(bad_field("logit_bias", "logit_bias[", shown_key, "]: found ", shown(value),
                            ", expected a number from -100 to 100"));
      return;
    }
    out->logit_bias.emplace_back(static_cast<int32_t>(id), value.get<float>());
  }
}

void read_stream(Fields& fields, GenerationFields* out) {
  fields.boolean("stream", &out->stream);
  const Json* options = fields.take("stream_options");
  if (options == nullptr) return;
  if (!options->is_object()) {
    fields.fail(bad_field("stream_options", "stream_options: found ", shown(*options),
                          ", expected an object"));
    return;
  }
  if (!out->stream) {
    fields.fail(bad_field("stream_options", "stream_options: only allowed with stream: true"));
    return;
  }
  Fields inner(*options, "stream_options.");
  inner.boolean("include_usage", &out->include_usage);
  inner.boolean("continuous_usage_stats", &out->continuous_usage_stats);
  // Random padding against traffic analysis: never sent here, and asking for none is harmless.
  inner.refuse("include_obfuscation", kNotSupported, {false});
  if (auto error = inner.finish()) fields.fail(std::move(*error));
}

// Fields of OpenAI and vLLM clients that both endpoints know. What is refused here is refused with
// a reason; a harmless value is one that asks for what happens anyway.
void read_common(Fields& fields, const SchemaContext& context, GenerationFields* out) {
  read_model(fields, &out->model);

  SamplingParams& s = out->sampling;
  s.temperature = context.defaults.temperature;
  s.top_p = context.defaults.top_p;
  s.min_p = context.defaults.min_p;
  s.repetition_penalty = context.defaults.repetition_penalty;
  fields.number("temperature", 0, 2, &s.temperature);
  if (fields.number("top_p", 0, 1, &s.top_p) && !(s.top_p > 0)) {
    fields.fail(bad_field("top_p", "top_p: found 0, expected a number above 0 and up to 1"));
  }
  int64_t top_k = context.defaults.top_k;
  fields.integer("top_k", -1, INT32_MAX, &top_k);
  s.top_k = static_cast<int32_t>(top_k);
  fields.number("min_p", 0, 1, &s.min_p);
  fields.number("presence_penalty", -2, 2, &s.presence_penalty);
  fields.number("frequency_penalty", -2, 2, &s.frequency_penalty);
  fields.number("repetition_penalty", kMinRepetitionPenalty, kMaxRepetitionPenalty,
                &s.repetition_penalty);
  read_logit_bias(fields, context.vocab_size, &s);
  int64_t seed = 0;
  if (fields.integer("seed", INT64_MIN, INT64_MAX, &seed)) s.seed = static_cast<uint64_t>(seed);

  fields.integer("n", 1, kMaxN, &out->n);
  int64_t max_tokens = 0;
  if (fields.integer("max_tokens", 1, INT64_MAX, &max_tokens)) out->max_tokens = max_tokens;
  fields.integer("min_tokens", 0, INT64_MAX, &s.min_tokens);

  read_stop(fields, out);
  if (const Json* ids = fields.take("stop_token_ids"); ids != nullptr) {
    if (!ids->is_array() || ids->size() > kMaxStopTokenIds) {
      fields.fail(bad_field("stop_token_ids", "stop_token_ids: found ", shown(*ids),
                            ", expected an array of up to ", kMaxStopTokenIds, " token ids"));
    } else {
      read_ids(fields, *ids, "stop_token_ids", context.vocab_size, &s.stop_token_ids);
    }
  }
  fields.boolean("include_stop_str_in_output", &out->include_stop_str_in_output);
  fields.boolean("ignore_eos", &s.ignore_eos);
  read_stream(fields, out);

  if (const Json* best_of = fields.take("best_of"); best_of != nullptr) {
    if (*best_of != Json(1) && *best_of != Json(out->n)) {
      fields.fail({400,
                   cat("best_of: found ", shown(*best_of), ", expected 1 or n (", out->n,
                       "); choices are not ranked"),
                   "invalid_request_error", "best_of", "unsupported_parameter"});
    }
  }

  // Cannot change the answer.
  std::string any_text;
  bool any_truth = false;
  for (const char* name :
       {"user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}) {
    fields.string(name, &any_text);
  }
  fields.boolean("store", &any_truth);
  if (const Json* metadata = fields.take("metadata");
      metadata != nullptr && !metadata->is_object()) {
    fields.fail(
        bad_field("metadata", "metadata: found ", shown(*metadata), ", expected an object"));
  }
  fields.refuse("service_tier", "there is one tier: auto", {"auto", "default"});
  fields.refuse("add_special_tokens", "K3's tokenizer adds no tokens to a prompt", {true, false});
  fields.refuse("spaces_between_special_tokens", kNotSupported, {true, false});
  fields.refuse("detokenize", kNotSupported, {true});
  fields.refuse("priority", "requests are served first come, first served", {0});
  fields.refuse("use_beam_search", kNotSupported, {false});
  fields.refuse("length_penalty", "it belongs to beam search", {1, 1.0});
  fields.refuse("early_stopping", "it belongs to beam search", {false});
  fields.refuse("return_tokens_as_token_ids", kNotSupported, {false});
  fields.refuse("return_token_ids", kNotSupported, {false});
  fields.refuse("prompt_logprobs", kNotSupported);
  fields.refuse("truncate_prompt_tokens", "a prompt is never cut", {});
  fields.refuse("allowed_token_ids", "use logit_bias", {});
  fields.refuse("bad_words", "use logit_bias", {});
  for (const char* name :
       {"guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding_backend",
        "guided_whitespace_pattern", "structured_outputs"}) {
    fields.refuse(name, kNoConstraint);
  }
}

std::optional<ApiError> check_common(GenerationFields* out) {
  if (out->max_tokens && out->sampling.min_tokens > *out->max_tokens) {
    return bad_field("min_tokens", "min_tokens: found ", out->sampling.min_tokens,
                     ", more than max_tokens (", *out->max_tokens, ")");
  }
  return std::nullopt;
}

void read_prompts(Fields& fields, const SchemaContext& context, CompletionBody* out) {
  const Json* prompt = fields.take("prompt");
  if (fields.failed()) return;
  auto empty = [&](const std::string& field) {
    fields.fail(bad_field(field, field, ": is empty; at least one token is needed"));
  };
  if (prompt == nullptr) {
    fields.fail({400,
                 "prompt: missing; expected a string, an array of strings, an array of token "
                 "ids or an array of such arrays",
                 "invalid_request_error", "prompt", "missing_required_parameter"});
    return;
  }
  if (prompt->is_string()) {
    if (prompt->get_ref<const std::string&>().empty()) return empty("prompt");
    out->prompts.emplace_back(prompt->get<std::string>());
    return;
  }
  if (!prompt->is_array()) {
    fields.fail(bad_field("prompt", "prompt: found ", shown(*prompt),
                          ", expected a string, an array of strings, an array of token ids or an "
                          "array of such arrays"));
    return;
  }
  if (prompt->empty()) return empty("prompt");
  if ((*prompt)[0].is_number()) {
    std::vector<int32_t> ids;
    if (read_ids(fields, *prompt, "prompt", context.vocab_size, &ids)) {
      out->prompts.emplace_back(std::move(ids));
    }
    return;
  }
  if (prompt->size() > kMaxChoices) {
    fields.fail(bad_field("prompt", "prompt: found ", prompt->size(), " prompts, the limit is ",
                          kMaxChoices));
    return;
  }
  for (size_t i = 0; i < prompt->size(); ++i) {
    const Json& item = (*prompt)[i];
    const std::string name = cat("prompt[", i, "]");
    if (item.is_string()) {
      if (item.get_ref<const std::string&>().empty()) return empty(name);
      out->prompts.emplace_back(item.get<std::string>());
    } else if (item.is_array()) {
      if (item.empty()) return empty(name);
      std::vector<int32_t> ids;
      if (!read_ids(fields, item, name, context.vocab_size, &ids)) return;
      out->prompts.emplace_back(std::move(ids));
    } else {
      fields.fail(bad_field(name, name, ": found ", shown(item),
                            ", expected a string or an array of token ids"));
      return;
    }
  }
}

}  // namespace

std::optional<ApiError> parse_completion_body(const Json& body, const SchemaContext& context,
                                              CompletionBody* out) {
  Fields fields(body);
  GenerationFields& common = out->common;
  read_common(fields, context, &common);
  read_prompts(fields, context, out);
  fields.boolean("skip_special_tokens", &common.skip_special_tokens);
  int64_t logprobs = -1;
  fields.integer("logprobs", 0, kMaxLogprobs, &logprobs);
  common.sampling.logprobs = static_cast<int32_t>(logprobs);
  fields.boolean("echo", &out->echo);
  if (out->echo && logprobs >= 0) {
    fields.fail({400,
                 "echo: together with logprobs it would need the prompt's logprobs, which this "
                 "server does not compute",
                 "invalid_request_error", "echo", "unsupported_parameter"});
  }
  fields.refuse("suffix", "the model does not fill in the middle");
  fields.refuse("response_format", "it belongs to /v1/chat/completions", {Json{{"type", "text"}}});
  if (auto error = fields.finish()) return error;
  if (out->prompts.size() * static_cast<size_t>(common.n) > kMaxChoices) {
    return bad_field("n", "n: ", out->prompts.size(), " prompts times n = ", common.n,
                     " is beyond the limit of ", kMaxChoices, " choices a request");
  }
  return check_common(&common);
}

std::optional<ApiError> parse_chat_body(const Json& body, const SchemaContext& context,
                                        ChatBody* out) {
  Fields fields(body);
  GenerationFields& common = out->common;
  read_common(fields, context, &common);

  int64_t completion_tokens = 0;
  if (fields.integer("max_completion_tokens", 1, INT64_MAX, &completion_tokens)) {
    if (common.max_tokens && *common.max_tokens != completion_tokens) {
      fields.fail(bad_field("max_completion_tokens", "max_completion_tokens: found ",
                            completion_tokens, ", but max_tokens says ", *common.max_tokens));
    }
    common.max_tokens = completion_tokens;
  }

  bool logprobs = false;
  fields.boolean("logprobs", &logprobs);
  int64_t top_logprobs = 0;
  if (fields.integer("top_logprobs", 0, kMaxLogprobs, &top_logprobs) && !logprobs) {
    fields.fail(bad_field("top_logprobs", "top_logprobs: only allowed with logprobs: true"));
  }
  common.sampling.logprobs = logprobs ? static_cast<int32_t>(top_logprobs) : -1;

  // Read by parse_chat_request below.
  fields.ignore({"messages", "tools", "tool_choice", "response_format", "thinking",
                 "reasoning_effort", "chat_template_kwargs"});
  fields.refuse("add_generation_prompt", "an answer needs the generation prompt", {true});
  fields.refuse("continue_final_message", kNotSupported, {false});
  fields.refuse("skip_special_tokens", "K3's markup never reaches a client", {true});
  fields.refuse("parallel_tool_calls", "K3's prompt cannot ask for one call at a time", {true});
  fields.refuse("include_reasoning", "set thinking to false instead", {true});
  fields.refuse("echo", "it belongs to /v1/completions", {false});
  fields.refuse("modalities", "text only", {Json::array({"text"})});
  fields.refuse("verbosity", kNotSupported, {"medium"});
  fields.refuse("chat_template", "K3's prompt format is built in");
  fields.refuse("documents", kNotSupported, {Json::array()});
  for (const char* name : {"functions", "function_call"}) {
    fields.refuse(name, "use tools and tool_choice");
  }
  for (const char* name : {"audio", "prediction", "web_search_options", "mm_processor_kwargs"}) {
    fields.refuse(name, kNotSupported);
  }
  if (auto error = fields.finish()) return error;

  auto chat = parse_chat_request(body);
  if (!chat.ok()) return to_api_error(chat.status());
  out->chat = std::move(chat).value();
  return check_common(&common);
}

std::optional<ApiError> parse_tokenize_body(const Json& body, TokenizeBody* out) {
  Fields fields(body);
  read_model(fields, &out->model);
  fields.boolean("return_token_strs", &out->return_token_strs);
  fields.refuse("add_special_tokens", "K3's tokenizer adds no tokens to a prompt", {true, false});
  const auto messages = body.find("messages");
  if (messages != body.end() && !messages->is_null()) {
    fields.ignore({"messages", "tools", "tool_choice", "response_format", "thinking",
                   "reasoning_effort", "chat_template_kwargs", "add_generation_prompt"});
    fields.refuse("prompt", "give prompt or messages, not both");
    fields.refuse("continue_final_message", kNotSupported, {false});
    if (auto error = fields.finish()) return error;
    auto chat = parse_chat_request(body);
    if (!chat.ok()) return to_api_error(chat.status());
    out->input = std::move(chat).value();
    return std::nullopt;
  }
  fields.ignore({"messages"});
  std::string prompt;
  if (!fields.string("prompt", &prompt)) {
    fields.fail({400, "prompt: missing; expected prompt or messages", "invalid_request_error",
                 "prompt", "missing_required_parameter"});
  }
  fields.boolean("parse_special", &out->parse_special);
  out->input = std::move(prompt);
  return fields.finish();
}

std::optional<ApiError> parse_detokenize_body(const Json& body, const SchemaContext& context,
                                              DetokenizeBody* out) {
  Fields fields(body);
  read_model(fields, &out->model);
  const Json* tokens = fields.take("tokens");
  if (tokens == nullptr) {
    fields.fail({400, "tokens: missing; expected an array of token ids", "invalid_request_error",
                 "tokens", "missing_required_parameter"});
  } else if (!tokens->is_array()) {
    fields.fail(
        bad_field("tokens", "tokens: found ", shown(*tokens), ", expected an array of token ids"));
  } else {
    read_ids(fields, *tokens, "tokens", context.vocab_size, &out->tokens);
  }
  return fields.finish();
}

std::optional<uint64_t> seed_of_choice(const SamplingParams& sampling, int64_t k) {
  if (!sampling.seed) return std::nullopt;
  return *sampling.seed + static_cast<uint64_t>(k);
}

}  // namespace k3
