#include "text/output_parser.h"

#include <algorithm>
#include <array>
#include <utility>

#include "text/py_json.h"
#include "text/utf8.h"

namespace k3 {
namespace {

using Kind = OutputEvent::Kind;

constexpr std::string_view kBlanks = " \t\r\n";

bool is_blank(std::string_view text) {
  return text.find_first_not_of(kBlanks) == std::string_view::npos;
}
std::string_view trim(std::string_view text) {
  const size_t begin = text.find_first_not_of(kBlanks);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kBlanks) - begin + 1);
}

// What stands between <|open|> or <|close|> and <|sep|>, read byte by byte so that prose after a
// stray control token is recognised (and let go) as soon as it can be no tag.
class TagReader {
 public:
  // A tag longer than this is none: nothing may hold text back for ever.
  static constexpr size_t kMaxBytes = 8192;

  void start() { *this = TagReader(); }
  // Adds bytes; false once they cannot be a tag.
  bool push(std::string_view bytes) {
    raw_ += bytes;
    if (raw_.size() > kMaxBytes) return false;
    return std::all_of(bytes.begin(), bytes.end(), [this](char c) { return step(c); });
  }
  // Whether <|sep|> here makes a whole tag.
  bool complete() const { return state_ == State::kName || state_ == State::kGap; }
  const std::string& raw() const { return raw_; }
  const std::string& name() const { return name_; }
  // The attribute's value, unescaped; nullptr if there is none.
  const std::string* attribute(std::string_view key) const {
    for (const auto& [k, v] : attributes_) {
      if (k == key) return &v;
    }
    return nullptr;
  }

 private:
  enum class State { kBefore, kName, kGap, kKey, kEquals, kValue };

  static bool name_char(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
           c == '-';
  }

  bool step(char c) {
    const bool blank = kBlanks.find(c) != std::string_view::npos;
    switch (state_) {
      case State::kBefore:
        if (blank) return true;
        state_ = State::kName;
        [[fallthrough]];
      case State::kName:
        if (name_char(c)) {
          name_ += c;
          return true;
        }
        state_ = State::kGap;
        return blank;
      case State::kGap:
        if (blank) return true;
        if (!name_char(c)) return false;
        attributes_.emplace_back(std::string(1, c), std::string());
        state_ = State::kKey;
        return true;
      case State::kKey:
        if (name_char(c)) {
          attributes_.back().first += c;
          return true;
        }
        state_ = State::kEquals;
        return c == '=';
      case State::kEquals:
        state_ = State::kValue;
        return c == '"';
      case State::kValue:
        if (c == '"') {
          attributes_.back().second = unescape(attributes_.back().second);
          state_ = State::kGap;
        } else {
          attributes_.back().second += c;
        }
        return true;
    }
    return false;
  }

  // The renderer escapes & and then "; undone in the opposite order.
  static std::string unescape(std::string text) {
    const auto replace = [&text](std::string_view from, char to) {
      std::string out;
      size_t at = 0;
      for (size_t hit = 0; (hit = text.find(from, at)) != std::string::npos;
           at = hit + from.size()) {
        out.append(text, at, hit - at);
        out += to;
      }
      out.append(text, at, std::string::npos);
      text = std::move(out);
    };
    replace("&quot;", '"');
    replace("&amp;", '&');
    return to_valid_utf8(text);
  }

  State state_ = State::kBefore;
  std::string raw_;
  std::string name_;
  std::vector<std::pair<std::string, std::string>> attributes_;
};

constexpr std::array<std::string_view, 7> kTagNames = {"think",    "response", "tools",  "call",
                                                       "argument", "json",     "message"};

}  // namespace

struct OutputParser::Impl {
  enum class Place {
    kThink,     // text is reasoning
    kResponse,  // text is content
    kBetween,   // no channel is open: blanks are layout, other text is content
    kTools,     // inside tools, between calls: the same
    kCall,      // inside a call, outside its children: perhaps a bare JSON body
    kString,    // argument of type string: text goes out as it comes
    kValue,     // argument of another type: held until it is known to be JSON
    kJson,      // json child: held likewise
  };
  enum class Reading { kText, kOpenTag, kCloseTag };

  Impl(std::shared_ptr<const Tokenizer> t, bool thinking)
      : tokenizer(std::move(t)), place(thinking ? Place::kThink : Place::kResponse) {}

  std::shared_ptr<const Tokenizer> tokenizer;
  Place place;
  Reading reading = Reading::kText;
  TagReader tag;
  Utf8Stream utf8;       // of the text in `place`
  std::string blanks;    // kBetween, kTools: blanks that go out only if text follows
  bool in_text = false;  // kBetween, kTools: text has begun, so blanks are part of it
  std::string held;      // kCall, kValue, kJson: the body so far
  int calls = 0;
  bool has_members = false;  // of the open call: "{" is out
  bool closed = false;
  bool finished = false;
  std::vector<OutputEvent> events;

  void emit(Kind kind, std::string text, int index = 0) {
    if (text.empty() && kind != Kind::kToolCallBegin && kind != Kind::kToolCallEnd) return;
    if (!events.empty() && events.back().kind == kind && events.back().index == index &&
        kind != Kind::kToolCallBegin && kind != Kind::kToolCallEnd) {
      events.back().text += text;
      return;
    }
    events.push_back({kind, std::move(text), index});
  }
  void emit_args(std::string text) { emit(Kind::kToolCallArgs, std::move(text), calls - 1); }

  bool in_call() const {
    return place == Place::kCall || place == Place::kString || place == Place::kValue ||
           place == Place::kJson;
  }

  // Bytes of the place's text. They become characters here, so that no event ends inside one.
  void text(std::string_view bytes) { characters(utf8.push(bytes)); }
  void characters(std::string chars) {
    if (chars.empty()) return;
    switch (place) {
      case Place::kThink:
        emit(Kind::kReasoning, std::move(chars));
        break;
      case Place::kResponse:
        emit(Kind::kContent, std::move(chars));
        break;
      case Place::kBetween:
      case Place::kTools:
        if (!in_text && is_blank(chars)) {
          blanks += chars;
        } else {
          in_text = true;
          emit(Kind::kContent, std::exchange(blanks, {}) + chars);
        }
        break;
      case Place::kString: {
        std::string escaped;
        append_json_escaped(chars, &escaped);
        emit_args(std::move(escaped));
        break;
      }
      case Place::kCall:
      case Place::kValue:
      case Place::kJson:
        held += chars;
        break;
    }
  }

  // Starts the next member of the open call's arguments.
  void begin_member(std::string_view key) {
    emit_args(cat(has_members ? ", " : "{", json_quoted(key), ": "));
    has_members = true;
  }

  // Ends what is open inside the call: its text becomes the rest of a member.
  void end_child() {
    characters(utf8.flush());
    switch (place) {
      case Place::kString:
        emit_args("\"");
        break;
      case Place::kValue: {
        const std::string_view body = trim(held);
        emit_args(is_json_text(body) ? std::string(body) : json_quoted(held));
        break;
      }
      case Place::kJson:
        if (!splice_object(trim(held))) {
          begin_member("json");
          emit_args(is_json_text(trim(held)) ? std::string(trim(held)) : json_quoted(held));
        }
        break;
      case Place::kCall: {
        // Text of a call outside its children. A whole JSON object is taken for the arguments;
        // other text is no argument, but must not be lost.
        if (!is_blank(held) && (has_members || !splice_object(trim(held)))) {
          emit(Kind::kContent, held);
        }
        break;
      }
      default:
        return;
    }
    held.clear();
    place = Place::kCall;
  }
  // Adds the members of a JSON object to the arguments; false if `body` is not one.
  bool splice_object(std::string_view body) {
    if (body.empty() || body.front() != '{' || !is_json_text(body)) return false;
    const std::string_view members = trim(body.substr(1, body.size() - 2));
    if (members.empty()) return true;
    emit_args((has_members ? ", " : "{") + std::string(members));
    has_members = true;
    return true;
  }

  void end_call() {
    end_child();
    emit_args(has_members ? "}" : "{}");
    emit(Kind::kToolCallEnd, {}, calls - 1);
    place = Place::kTools;
  }

  // Leaves the place for another, whatever was open in it.
  void go_to(Place next) {
    if (in_call()) end_call();
    characters(utf8.flush());
    blanks.clear();
    in_text = false;
    place = next;
  }

  void open_tag() {
    const std::string& name = tag.name();
    if (name == "think") {
      go_to(Place::kThink);
    } else if (name == "response") {
      go_to(Place::kResponse);
    } else if (name == "tools") {
      go_to(Place::kTools);
    } else if (name == "message") {
      go_to(Place::kBetween);
    } else if (name == "call") {
      const std::string* tool = tag.attribute("tool");
      if (tool == nullptr) tool = tag.attribute("name");
      if (tool == nullptr || tool->empty()) return;  // a call of nothing: its text is text
      go_to(Place::kCall);
      emit(Kind::kToolCallBegin, *tool, calls++);
      has_members = false;
    } else if (name == "argument" && in_call()) {
      end_child();
      const std::string* key = tag.attribute("key");
      const std::string* type = tag.attribute("type");
      begin_member(key == nullptr ? std::string_view() : *key);
      constexpr std::array<std::string_view, 5> kJsonTypes = {"number", "boolean", "null", "object",
                                                              "array"};
      if (type != nullptr &&
          std::find(kJsonTypes.begin(), kJsonTypes.end(), *type) != kJsonTypes.end()) {
        place = Place::kValue;
      } else {
        emit_args("\"");
        place = Place::kString;
      }
    } else if (name == "json" && in_call()) {
      end_child();
      place = Place::kJson;
    }
    // Any other tag is markup nobody asked for; what it encloses stays text of the place.
  }

  void close_tag() {
    const std::string& name = tag.name();
    if (name == "think") {
      if (place == Place::kThink) go_to(Place::kBetween);
    } else if (name == "response") {
      // Also out of think: a model that forgot to close it and never opened the response.
      if (place == Place::kResponse || place == Place::kThink) go_to(Place::kBetween);
    } else if (name == "tools") {
      if (in_call() || place == Place::kTools) go_to(Place::kBetween);
    } else if (name == "message") {
      go_to(Place::kBetween);
      closed = true;
    } else if (name == "call") {
      if (in_call()) end_call();
    } else if (name == "argument") {
      if (place == Place::kString || place == Place::kValue) end_child();
    } else if (name == "json") {
      if (place == Place::kJson) end_child();
    }
  }

  // The tag being read turned out to be none: its text is text of the place.
  void abandon_tag() {
    reading = Reading::kText;
    text(tag.raw());
  }
  // The tag being read is cut short. What may be the beginning of markup is dropped, prose is kept.
  void interrupt_tag() {
    if (reading == Reading::kText) return;
    const std::string_view name = tag.name();
    const bool markup = std::any_of(kTagNames.begin(), kTagNames.end(),
                                    [name](std::string_view n) { return n.starts_with(name); });
    if (markup) {
      reading = Reading::kText;
    } else {
      abandon_tag();
    }
  }

  void push(int32_t id) {
    const Tokenizer::Markup& m = tokenizer->markup();
    if (id < 0) return;
    if (id == m.open || id == m.close) {
      interrupt_tag();
      reading = id == m.open ? Reading::kOpenTag : Reading::kCloseTag;
      tag.start();
    } else if (id == m.sep) {
      if (reading == Reading::kText) return;
      if (!tag.complete()) {
        interrupt_tag();
        return;
      }
      const Reading which = std::exchange(reading, Reading::kText);
      if (which == Reading::kOpenTag) {
        open_tag();
      } else {
        close_tag();
      }
    } else if (id == m.end_of_msg || id == m.eos) {
      interrupt_tag();
      closed = true;
    } else if (tokenizer->is_special(id)) {
      return;  // other control tokens mean nothing in a message's text
    } else if (reading == Reading::kText) {
      text(tokenizer->token_bytes(id));
    } else if (!tag.push(tokenizer->token_bytes(id))) {
      abandon_tag();
    }
  }

  void finish() {
    if (std::exchange(finished, true)) return;
    interrupt_tag();
    go_to(Place::kBetween);
  }
};

OutputParser::OutputParser(std::shared_ptr<const Tokenizer> tokenizer, bool thinking)
    : impl_(std::make_unique<Impl>(std::move(tokenizer), thinking)) {}
OutputParser::~OutputParser() = default;
OutputParser::OutputParser(OutputParser&&) noexcept = default;

std::vector<OutputEvent> OutputParser::push(int32_t id) {
  if (!impl_->finished) impl_->push(id);
  return std::exchange(impl_->events, {});
}

std::vector<OutputEvent> OutputParser::finish() {
  impl_->finish();
  return std::exchange(impl_->events, {});
}

int OutputParser::num_tool_calls() const { return impl_->calls; }
bool OutputParser::message_closed() const { return impl_->closed; }

}  // namespace k3
