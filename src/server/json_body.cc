#include "server/json_body.h"

#include <nlohmann/json.hpp>
#include <string>
#include <unordered_set>
#include <vector>

#include "core/json_guard.h"

namespace k3 {
namespace {

using Json = nlohmann::ordered_json;

// Builds the tree itself, for three reasons: ordered_json's own insertion searches all earlier keys
// (quadratic in a body of many keys), it lets a duplicate key win in silence, and it has no depth
// limit.
class Builder : public nlohmann::json_sax<Json> {
 public:
  explicit Builder(Json* root) : root_(root) {}

  bool null() override { return add(Json()) != nullptr; }
  bool boolean(bool v) override { return add(Json(v)) != nullptr; }
  bool number_integer(int64_t v) override { return add(Json(v)) != nullptr; }
  bool number_unsigned(uint64_t v) override { return add(Json(v)) != nullptr; }
  bool number_float(double v, const std::string&) override { return add(Json(v)) != nullptr; }
  bool string(std::string& v) override { return add(Json(std::move(v))) != nullptr; }
  bool binary(Json::binary_t&) override { return false; }

  bool start_object(size_t) override { return open(Json::object()); }
  bool end_object() override { return close(); }
  bool start_array(size_t) override { return open(Json::array()); }
  bool end_array() override { return close(); }

  bool key(std::string& v) override {
    if (!keys_.back().insert(v).second) {
      error_ = cat("the body gives the key \"", v, "\" twice in one object");
      return false;
    }
    key_ = std::move(v);
    return true;
  }

  bool parse_error(size_t position, const std::string&, const Json::exception& e) override {
    // The library's message repeats the offending text, which may be a prompt; say only where.
    if (e.id == 406) {
      error_ = cat("the body has a number beyond double precision at byte ", position);
    } else {
      error_ = cat("the body is not valid JSON (or not UTF-8) at byte ", position);
    }
    return false;
  }

  const std::string& error() const { return error_; }

 private:
  Json* add(Json value) {
    if (open_.empty()) {
      *root_ = std::move(value);
      return root_;
    }
    Json& parent = *open_.back();
    if (parent.is_array()) {
      auto& items = parent.get_ref<Json::array_t&>();
      items.push_back(std::move(value));
      return &items.back();
    }
    // The vector beneath ordered_map: the key is known to be new.
    auto& members = static_cast<std::vector<std::pair<const std::string, Json>>&>(
        parent.get_ref<Json::object_t&>());
    members.emplace_back(std::move(key_), std::move(value));
    return &members.back().second;
  }

  bool open(Json container) {
    if (open_.size() >= static_cast<size_t>(kMaxBodyDepth)) {
      error_ = cat("the body nests deeper than ", kMaxBodyDepth, " levels");
      return false;
    }
    open_.push_back(add(std::move(container)));
    keys_.emplace_back();
    return true;
  }

  bool close() {
    open_.pop_back();
    keys_.pop_back();
    return true;
  }

  Json* root_;
  std::vector<Json*> open_;  // stable: only the innermost container grows
  std::vector<std::unordered_set<std::string>> keys_;
  std::string key_;
  std::string error_;
};

}  // namespace

std::optional<ApiError> parse_json_body(std::string_view text, Json* out) {
  if (const size_t at = json_forbidden_byte(text); at != std::string_view::npos) {
    return ApiError{400, cat("the body is not valid JSON (or not UTF-8) at byte ", at),
                    "invalid_request_error", "", "invalid_json"};
  }
  Builder builder(out);
  if (!Json::sax_parse(text.begin(), text.end(), &builder)) {
    return ApiError{400, builder.error(), "invalid_request_error", "", "invalid_json"};
  }
  if (!out->is_object()) {
    return ApiError{400, cat("the body must be a JSON object, found ", out->type_name()),
                    "invalid_request_error", "", "invalid_json"};
  }
  return std::nullopt;
}

}  // namespace k3
