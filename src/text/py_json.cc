#include "text/py_json.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <utility>
#include <vector>

#include "core/json_guard.h"
#include "text/utf8.h"

namespace k3 {
namespace {

using json = nlohmann::ordered_json;

class Writer {
 public:
  Writer(JsonStyle style, std::string* out) : style_(style), out_(*out) {}

  void value(const json& v) {
    switch (v.type()) {
      case json::value_t::object:
        object(v);
        break;
      case json::value_t::array: {
        out_ += '[';
        bool first = true;
        for (const json& item : v) {
          if (!std::exchange(first, false)) comma();
          value(item);
        }
        out_ += ']';
        break;
      }
      case json::value_t::string:
        string(v.get_ref<const std::string&>());
        break;
      case json::value_t::boolean:
        out_ += v.get<bool>() ? "true" : "false";
        break;
      case json::value_t::number_integer:
        out_ += std::to_string(v.get<int64_t>());
        break;
      case json::value_t::number_unsigned:
        out_ += std::to_string(v.get<uint64_t>());
        break;
      case json::value_t::number_float:
        out_ += py_float_repr(v.get<double>());
        break;
      case json::value_t::binary: {  // the digits of a long integer (py_json_loads)
        const auto& digits = v.get_binary();
        out_.append(digits.begin(), digits.end());
        break;
      }
      case json::value_t::null:
      case json::value_t::discarded:
        out_ += "null";
        break;
    }
  }

 private:
  void comma() { out_ += style_ == JsonStyle::kPlain ? ", " : ","; }
  void string(const std::string& s) {
    out_ += '"';
    append_json_escaped(s, &out_);
    out_ += '"';
  }
  void member(const std::string& key, const json& v, bool* first) {
    if (!std::exchange(*first, false)) comma();
    string(key);
    out_ += style_ == JsonStyle::kPlain ? ": " : ":";
    value(v);
  }
  void object(const json& v) {
    out_ += '{';
    bool first = true;
    if (style_ == JsonStyle::kPlain) {
      for (auto it = v.begin(); it != v.end(); ++it) member(it.key(), it.value(), &first);
    } else {
      std::vector<std::pair<const std::string*, const json*>> members;
      members.reserve(v.size());
      for (auto it = v.begin(); it != v.end(); ++it) members.emplace_back(&it.key(), &it.value());
      // Byte order of UTF-8 is code point order, which is how Python sorts.
      std::sort(members.begin(), members.end(),
                [](const auto& a, const auto& b) { return *a.first < *b.first; });
      for (const auto& [key, item] : members) member(*key, *item, &first);
    }
    out_ += '}';
  }

  JsonStyle style_;
  std::string& out_;
};

// Builds the value without recursion, stops at kMaxJsonDepth, keeps the digits of integers that do
// not fit 64 bits (as binary: JSON itself has none).
class Loader : public nlohmann::json_sax<json> {
 public:
  json root;
  bool too_deep = false;

  bool null() override { return put(json(nullptr)); }
  bool boolean(bool v) override { return put(json(v)); }
  bool number_integer(number_integer_t v) override { return put(json(v)); }
  bool number_unsigned(number_unsigned_t v) override { return put(json(v)); }
  bool number_float(number_float_t v, const string_t& digits) override {
    if (digits.find_first_of(".eE") == std::string::npos) {
      return put(json::binary(std::vector<uint8_t>(digits.begin(), digits.end())));
    }
    return put(json(v));
  }
  bool string(string_t& v) override { return put(json(std::move(v))); }
  bool binary(binary_t&) override { return false; }  // not in JSON text
  bool start_object(size_t) override { return open(json::object()); }
  bool start_array(size_t) override { return open(json::array()); }
  bool key(string_t& v) override {
    key_ = std::move(v);
    return true;
  }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool parse_error(size_t, const std::string&, const nlohmann::detail::exception&) override {
    return false;
  }

 private:
  json* place(json&& v) {
    if (stack_.empty()) {
      root = std::move(v);
      return &root;
    }
    json& parent = *stack_.back();
    if (parent.is_array()) {
      parent.push_back(std::move(v));
      return &parent.back();
    }
    json& slot = parent[key_];  // a repeated key keeps its place and takes the last value
    slot = std::move(v);
    return &slot;
  }
  bool put(json&& v) {
    place(std::move(v));
    return true;
  }
  bool open(json&& v) {
    if (stack_.size() == kMaxJsonDepth) {
      too_deep = true;
      return false;
    }
    stack_.push_back(place(std::move(v)));
    return true;
  }
  bool close() {
    stack_.pop_back();
    return true;
  }

  std::vector<json*> stack_;  // a parent does not change while its child is open
  std::string key_;
};

bool may_be_json(std::string_view text) {
  return json_forbidden_byte(text) == std::string_view::npos;
}

}  // namespace

bool is_json_text(std::string_view text) {
  return may_be_json(text) && json::accept(text.begin(), text.end());
}

bool json_depth_ok(const json& value) {
  struct Level {
    json::const_iterator at, end;
  };
  std::vector<Level> stack;
  const json* current = &value;
  for (;;) {
    if (current->is_structured()) {
      if (stack.size() == kMaxJsonDepth) return false;
      stack.push_back({current->begin(), current->end()});
    }
    while (!stack.empty() && stack.back().at == stack.back().end) stack.pop_back();
    if (stack.empty()) return true;
    current = &*stack.back().at;
    ++stack.back().at;
  }
}

std::string py_json_dumps(const json& value, JsonStyle style) {
  std::string out;
  Writer(style, &out).value(value);
  return out;
}

std::string py_float_repr(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value < 0 ? "-Infinity" : "Infinity";
  // The shortest digits that read back: d.ddde[+-]xx.
  std::array<char, 40> buffer;
  const auto end = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value,
                                 std::chars_format::scientific);
  std::string_view text(buffer.data(), static_cast<size_t>(end.ptr - buffer.data()));
  std::string out;
  if (text.front() == '-') {
    out = "-";
    text.remove_prefix(1);
  }
  const size_t e = text.find('e');
  const int exponent = std::atoi(std::string(text.substr(e + 1)).c_str());
  std::string digits(text.substr(0, 1));
  if (e > 1) digits += text.substr(2, e - 2);
  const int point = exponent + 1;  // digits before the decimal point
  const auto count = static_cast<int>(digits.size());
  if (point > 16 || point <= -4) {  // repr's thresholds
    out += digits[0];
    if (count > 1) out += "." + digits.substr(1);
    out += exponent < 0 ? "e-" : "e+";
    const int magnitude = std::abs(exponent);
    if (magnitude < 10) out += '0';
    return out + std::to_string(magnitude);
  }
  if (point <= 0) return out + "0." + std::string(static_cast<size_t>(-point), '0') + digits;
  if (point >= count)
    return out + digits + std::string(static_cast<size_t>(point - count), '0') + ".0";
  return out + digits.substr(0, static_cast<size_t>(point)) + "." +
         digits.substr(static_cast<size_t>(point));
}

void append_json_escaped(std::string_view text, std::string* out) {
  constexpr std::string_view kHex = "0123456789abcdef";
  for (const char c : text) {
    switch (c) {
      case '"':
        *out += "\\\"";
        break;
      case '\\':
        *out += "\\\\";
        break;
      case '\n':
        *out += "\\n";
        break;
      case '\r':
        *out += "\\r";
        break;
      case '\t':
        *out += "\\t";
        break;
      case '\b':
        *out += "\\b";
        break;
      case '\f':
        *out += "\\f";
        break;
      default:
        if (static_cast<unsigned char>(c) < 0x20) {
          *out += "\\u00";
          *out += kHex[static_cast<unsigned char>(c) >> 4];
          *out += kHex[c & 0xf];
        } else {
          *out += c;
        }
    }
  }
}

std::string json_quoted(std::string_view text) {
  std::string out = "\"";
  append_json_escaped(to_valid_utf8(text), &out);
  out += '"';
  return out;
}

ParsedJson py_json_loads(std::string_view text) {
  if (!may_be_json(text)) return {};
  Loader loader;
  const bool ok = json::sax_parse(text.begin(), text.end(), &loader);
  if (loader.too_deep) return {ParsedJson::Kind::kTooDeep, nullptr};
  if (!ok) return {ParsedJson::Kind::kNotJson, nullptr};
  return {ParsedJson::Kind::kOk, std::move(loader.root)};
}

}  // namespace k3
