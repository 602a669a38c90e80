#include "server/choice_pipeline.h"

#include <algorithm>
#include <utility>

namespace k3 {
namespace {

int64_t count_characters(std::string_view text) {
  return std::count_if(text.begin(), text.end(),
                       [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; });
}

}  // namespace

ChoicePipeline::ChoicePipeline(std::shared_ptr<const Tokenizer> tokenizer, PipelineOptions options)
    : tokenizer_(std::move(tokenizer)), options_(std::move(options)) {
  if (options_.chat) parser_ = std::make_unique<OutputParser>(tokenizer_, options_.thinking);
  text_chars_ = options_.text_offset;
}

ChoicePipeline::~ChoicePipeline() = default;
ChoicePipeline::ChoicePipeline(ChoicePipeline&&) noexcept = default;

std::vector<Delta> ChoicePipeline::push(const TokenOutput& token) {
  std::vector<Delta> out;
  if (stopped_ || finished_) return out;
  ++tokens_;
  if (token.is_end) return out;
  const int64_t begin = text_bytes_;
  const int64_t offset = text_chars_;
  if (options_.chat) {
    // The end id usually follows a closed message. If the model talks on, nobody would hear it;
    // only min_tokens and ignore_eos ask for more all the same.
    if (parser_->message_closed() && !options_.ignore_eos && tokens_ > options_.min_tokens) {
      stopped_ = true;
      return out;
    }
    for (OutputEvent& event : parser_->push(token.token)) {
      add_event(std::move(event), &out);
      if (stopped_) break;
    }
  } else if (!(options_.skip_special_tokens && tokenizer_->is_special(token.token))) {
    add_text(Delta::Kind::kContent, utf8_.push(tokenizer_->token_bytes(token.token)), &out);
  }
  if (options_.logprobs) {
    note_logprob(token, begin, offset);
    release_logprobs(false);
  }
  return out;
}

std::vector<Delta> ChoicePipeline::finish() {
  std::vector<Delta> out;
  if (finished_) return out;
  finished_ = true;
  // After a stop string's match there is nothing left that may be said, save that a call begun
  // before it must end as valid JSON.
  if (options_.chat) {
    for (OutputEvent& event : parser_->finish()) {
      const bool text =
          event.kind == OutputEvent::Kind::kReasoning || event.kind == OutputEvent::Kind::kContent;
      if (!stopped_ || !text) add_event(std::move(event), &out);
    }
  } else if (!stopped_) {
    add_text(Delta::Kind::kContent, utf8_.flush(), &out);
  }
  switch_channel(std::nullopt, &out);
  release_logprobs(true);
  return out;
}

std::vector<LogprobEntry> ChoicePipeline::take_logprobs() { return std::exchange(released_, {}); }

const char* ChoicePipeline::finish_reason(FinishReason reason) const {
  if (reason == FinishReason::kLength && !stopped_) return "length";
  return num_tool_calls_ > 0 ? "tool_calls" : "stop";
}

void ChoicePipeline::add_event(OutputEvent event, std::vector<Delta>* out) {
  switch (event.kind) {
    case OutputEvent::Kind::kReasoning:
      return add_text(Delta::Kind::kReasoning, std::move(event.text), out);
    case OutputEvent::Kind::kContent:
      return add_text(Delta::Kind::kContent, std::move(event.text), out);
    case OutputEvent::Kind::kToolCallBegin: {
      switch_channel(Delta::Kind::kToolCallArgs, out);
      if (!options_.return_tools) return;
      num_tool_calls_ = std::max(num_tool_calls_, event.index + 1);
      Delta delta{Delta::Kind::kToolCallBegin, std::move(event.text), event.index, ""};
      delta.call_id = cat(delta.text, ":", event.index);
      out->push_back(std::move(delta));
      return;
    }
    case OutputEvent::Kind::kToolCallArgs:
      if (!options_.return_tools || event.text.empty()) return;
      if (!out->empty() && out->back().kind == Delta::Kind::kToolCallArgs &&
          out->back().index == event.index) {
        out->back().text += event.text;
      } else {
        out->push_back({Delta::Kind::kToolCallArgs, std::move(event.text), event.index, ""});
      }
      return;
    case OutputEvent::Kind::kToolCallEnd:
      return;
  }
}

void ChoicePipeline::add_text(Delta::Kind kind, std::string text, std::vector<Delta>* out) {
  if (text.empty() || stopped_) return;
  if (channel_ != kind) switch_channel(kind, out);
  text_bytes_ += static_cast<int64_t>(text.size());
  text_chars_ += count_characters(text);
  if (options_.stop.empty() || tokens_ <= options_.min_tokens) {
    emit_text(kind, std::move(text), out);
    return;
  }
  if (!matcher_) matcher_.emplace(options_.stop, options_.include_stop_str_in_output);
  emit_text(kind, matcher_->push(text), out);
  if (matcher_->matched() >= 0) {
    stopped_ = true;
    matched_stop_ = matcher_->matched();
  }
}

// A stop string does not reach across channels: what the old channel holds back is said before the
// new one begins.
void ChoicePipeline::switch_channel(std::optional<Delta::Kind> channel, std::vector<Delta>* out) {
  if (matcher_ && channel_ && matcher_->matched() < 0) emit_text(*channel_, matcher_->flush(), out);
  matcher_.reset();
  channel_ = channel;
}

void ChoicePipeline::emit_text(Delta::Kind kind, std::string text, std::vector<Delta>* out) {
  if (text.empty()) return;
  sent_bytes_ += static_cast<int64_t>(text.size());
  if (!out->empty() && out->back().kind == kind) {
    out->back().text += text;
  } else {
    out->push_back({kind, std::move(text), 0, ""});
  }
}

// Listed are the tokens of the text itself: not the markup around channels, not the tool calls.
void ChoicePipeline::note_logprob(const TokenOutput& token, int64_t begin, int64_t offset) {
  if (options_.chat) {
    const Tokenizer::Markup& markup = tokenizer_->markup();
    if (token.token == markup.open || token.token == markup.close) in_tag_ = true;
    const bool tag = in_tag_;
    if (token.token == markup.sep) in_tag_ = false;
    if (tag || tokenizer_->is_special(token.token) || parser_->num_tool_calls() > 0) return;
  }
  Pending pending;
  pending.entry.chosen = {token.chosen.token, token.chosen.logprob};
  pending.entry.text_offset = offset;
  for (const TokenLogprob& candidate : token.top) {
    pending.entry.top.push_back({candidate.token, candidate.logprob});
  }
  pending.begin = begin;
  // A token that has said nothing yet (part of a character) waits for the bytes it belongs to.
  pending.end = std::max(text_bytes_, begin + 1);
  pending_.push_back(std::move(pending));
}

void ChoicePipeline::release_logprobs(bool all) {
  size_t kept = 0;
  while (kept < pending_.size()) {
    const Pending& p = pending_[kept];
    const bool out = p.end <= sent_bytes_;
    const bool cut = matched_stop_ >= 0 && p.begin >= sent_bytes_;
    if (!out && !(all && !cut)) break;
    released_.push_back(std::move(pending_[kept].entry));
    ++kept;
  }
  pending_.erase(pending_.begin(), pending_.begin() + static_cast<int64_t>(kept));
}

}  // namespace k3
