#include "core/strict_json.h"

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <utility>
#include <vector>

#include "core/json_guard.h"

namespace k3 {
namespace {

using nlohmann::json;

// Builds the document and refuses what nlohmann's own builder lets pass: a second value for one
// name (it keeps the last) and any depth.
class StrictBuilder : public nlohmann::json_sax<json> {
 public:
  explicit StrictBuilder(int max_depth) : max_depth_(max_depth) {}

  json take() { return std::move(root_); }
  const std::string& error() const { return error_; }

  bool null() override { return add(nullptr); }
  bool boolean(bool v) override { return add(v); }
  bool number_integer(number_integer_t v) override { return add(v); }
  bool number_unsigned(number_unsigned_t v) override { return add(v); }
  bool number_float(number_float_t v, const string_t&) override { return add(v); }
  bool string(string_t& v) override { return add(std::move(v)); }
  bool binary(binary_t&) override { return fail("binary value"); }

  bool start_object(std::size_t) override { return open(json::object()); }
  bool start_array(std::size_t) override { return open(json::array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool key(string_t& name) override {
    if (open_.back()->contains(name)) {
      return fail(cat("the name ", describe_json(name), " appears twice in one object"));
    }
    name_ = std::move(name);
    return true;
  }

  bool parse_error(std::size_t position, const std::string& last_token,
                   const nlohmann::detail::exception& e) override {
    // The library's text carries its own numbering; the part after the last ": " says the cause.
    std::string what = e.what();
    if (const size_t at = what.rfind("; last read"); at != std::string::npos) what.resize(at);
    if (const size_t at = what.find("syntax error"); at != std::string::npos) what.erase(0, at);
    constexpr size_t kShown = 40;
    std::string shown;
    for (const char c : last_token.substr(0, kShown)) {
      shown += c >= 0x20 && c < 0x7f ? c : '?';
    }
    return fail(cat("not JSON at byte ", position, " near '", shown, "': ", what));
  }

 private:
  bool fail(std::string message) {
    if (error_.empty()) error_ = std::move(message);
    return false;
  }
  json* place(json value) {
    if (open_.empty()) {
      root_ = std::move(value);
      return &root_;
    }
    json& parent = *open_.back();
    if (parent.is_array()) {
      parent.push_back(std::move(value));
      return &parent.back();
    }
    json& slot = parent[name_];
    slot = std::move(value);
    return &slot;
  }
  template <typename T>
  bool add(T&& value) {
    place(json(std::forward<T>(value)));
    return true;
  }
  bool open(json empty) {
    if (static_cast<int>(open_.size()) >= max_depth_) {
      return fail(cat("nested deeper than ", max_depth_, " levels"));
    }
    open_.push_back(place(std::move(empty)));
    return true;
  }
  bool close() {
    open_.pop_back();
    return true;
  }

  const int max_depth_;
  json root_;
  // Pointers stay valid: while a container is open only it and its own children grow.
  std::vector<json*> open_;
  std::string name_;
  std::string error_;
};

}  // namespace

Result<json> parse_strict_json(std::string_view text, const std::string& origin, int max_depth) {
  if (const size_t at = json_forbidden_byte(text); at != std::string_view::npos) {
    return checkpoint_error(origin, ": not JSON at byte ", at, ": ",
                            at == 0 && text[0] != '\0' ? "a byte order mark" : "a NUL byte",
                            ", expected UTF-8 text without either");
  }
  StrictBuilder builder(max_depth);
  try {
    if (!json::sax_parse(text.begin(), text.end(), &builder)) {
      return checkpoint_error(origin, ": ", builder.error().empty() ? "not JSON" : builder.error());
    }
  } catch (const std::exception& e) {
    return checkpoint_error(origin, ": not JSON: ", e.what());
  }
  return builder.take();
}

std::string describe_json(const json& value) {
  constexpr size_t kShown = 64;
  std::string text = value.dump(-1, ' ', true, json::error_handler_t::replace);
  if (text.size() > kShown) {
    text.resize(kShown);
    text += "...";
  }
  return text;
}

Result<std::string> read_text_file(const std::string& path, int64_t max_bytes) {
  std::error_code ec;
  const auto status = std::filesystem::status(path, ec);
  if (!std::filesystem::exists(status)) return checkpoint_error(path, ": no such file");
  if (!std::filesystem::is_regular_file(status)) {
    return checkpoint_error(path, ": not a regular file");
  }
  const uintmax_t size = std::filesystem::file_size(path, ec);
  if (ec) return checkpoint_error(path, ": ", ec.message());
  if (size == 0) return checkpoint_error(path, ": the file is empty");
  if (size > static_cast<uintmax_t>(max_bytes)) {
    return checkpoint_error(path, ": ", size, " bytes, expected at most ", max_bytes);
  }
  std::ifstream in(path, std::ios::binary);
  if (!in) return checkpoint_error(path, ": cannot open: ", std::strerror(errno));
  std::string text(static_cast<size_t>(size), '\0');
  in.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (in.gcount() != static_cast<std::streamsize>(text.size())) {
    return checkpoint_error(path, ": read ", in.gcount(), " of ", size, " bytes");
  }
  if (is_lfs_pointer(text)) {
    return checkpoint_error(path, ": a Git LFS pointer, not the file itself (git lfs pull)");
  }
  return text;
}

bool is_lfs_pointer(std::string_view file_begin) {
  return file_begin.starts_with("version https://git-lfs.github.com/spec/");
}

}  // namespace k3
