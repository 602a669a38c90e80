#include "text/tokenizer.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <nlohmann/json.hpp>
#include <unordered_map>

#include "core/strict_json.h"
#include "text/bpe.h"
#include "text/pre_tokenizer.h"

namespace k3 {
namespace {

using json = nlohmann::json;

// K3 has 256 slots above its ranks. More than this is a vocabulary size that belongs to another
// file.
constexpr int64_t kMaxSpecialSlots = 65'536;

// Either file; K3's vocabulary has 2.8 MB.
constexpr int64_t kMaxFileBytes = 256 << 20;

constexpr std::array<int8_t, 256> kBase64 = [] {
  std::array<int8_t, 256> table{};
  table.fill(-1);
  constexpr std::string_view kAlphabet =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  for (size_t i = 0; i < kAlphabet.size(); ++i) {
    table[static_cast<unsigned char>(kAlphabet[i])] = static_cast<int8_t>(i);
  }
  return table;
}();

// Appends the bytes of padded base64; false if `text` is not that.
bool decode_base64(std::string_view text, std::string* out) {
  if (text.empty() || text.size() % 4 != 0) return false;
  size_t padding = 0;
  while (padding < 2 && text[text.size() - 1 - padding] == '=') ++padding;
  uint32_t bits = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const bool pad = i >= text.size() - padding;
    const int value = pad ? 0 : kBase64[static_cast<unsigned char>(text[i])];
    if (value < 0) return false;
    bits = (bits << 6) | static_cast<uint32_t>(value);
    if (i % 4 != 3) continue;
    const size_t bytes = i + 1 == text.size() ? 3 - padding : 3;
    // What padding cuts off must be zero, or two lines could spell one token.
    if ((bits & ((1U << (8 * (3 - bytes))) - 1)) != 0) return false;
    for (size_t k = 0; k < bytes; ++k) {
      out->push_back(static_cast<char>((bits >> (16 - 8 * k)) & 0xff));
    }
    bits = 0;
  }
  return true;
}

// What a line holds, short enough for a message and printable.
std::string excerpt(std::string_view text) {
  std::string out = "\"";
  for (char c : text.substr(0, 40)) out += c >= ' ' && c <= '~' ? c : '?';
  out += text.size() > 40 ? "...\"" : "\"";
  return out;
}

}  // namespace

struct Tokenizer::Impl {
  std::string blob;                      // the bytes of all ranks
  std::string special_blob;              // the spelling of all special tokens
  std::vector<std::string_view> tokens;  // [vocab_size], into the two
  int64_t num_ranks = 0;
  RankTable ranks;
  std::unordered_map<std::string_view, int32_t> specials;
  std::vector<size_t> special_sizes;  // distinct, longest first
  std::array<bool, 256> begins_special{};
  Markup markup;

  Status read_ranks(std::string_view file, int64_t vocab_size);
  Status read_specials(std::string_view config, int64_t vocab_size);
  void encode_slice(std::string_view slice, std::vector<int32_t>* ids) const {
    for_each_piece_of_slice(
        slice, [this, ids](std::string_view piece) { ranks.encode_piece(piece, ids); });
  }
  // The special token spelled at text[i], the longest if several; -1 if none.
  int32_t special_at(std::string_view text, size_t i) const;
};

// Fills blob and tokens[0, num_ranks); read_specials adds the rest.
Status Tokenizer::Impl::read_ranks(std::string_view file, int64_t vocab_size) {
  struct Entry {
    size_t begin, end, line;
  };
  // Ranks are dense, so none reaches the number of lines.
  const int64_t max_ranks = std::count(file.begin(), file.end(), '\n') + 1;
  std::vector<Entry> entries(static_cast<size_t>(max_ranks));  // by rank; line 0 = not seen
  int64_t count = 0;
  int64_t highest = -1;
  size_t highest_line = 0;
  size_t line_number = 0;
  blob.reserve(file.size());
  for (size_t at = 0; at < file.size();) {
    size_t newline = file.find('\n', at);
    if (newline == std::string_view::npos) newline = file.size();
    std::string_view line = file.substr(at, newline - at);
    at = newline + 1;
    ++line_number;
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (line.empty()) continue;
    const size_t space = line.find(' ');
    const size_t begin = blob.size();
    if (space == std::string_view::npos || !decode_base64(line.substr(0, space), &blob)) {
      return checkpoint_error("tiktoken.model line ", line_number, ": ", excerpt(line),
                              ", expected base64 of a token, a space and its rank");
    }
    const std::string_view digits = line.substr(space + 1);
    int32_t rank = -1;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), rank);
    if (error != std::errc() || end != digits.data() + digits.size() || rank < 0 ||
        digits.front() == '-') {
      return checkpoint_error("tiktoken.model line ", line_number, ": rank ", excerpt(digits),
                              ", expected a number from 0 to 2147483646");
    }
    if (rank >= vocab_size) {
      return checkpoint_error("tiktoken.model line ", line_number, ": rank ", rank,
                              " is beyond vocab_size ", vocab_size);
    }
    if (rank >= max_ranks) {
      return checkpoint_error("tiktoken.model line ", line_number, ": rank ", rank,
                              " in a file of ", max_ranks,
                              " lines, expected each rank from 0 on once");
    }
    const auto index = static_cast<size_t>(rank);
    if (entries[index].line != 0) {
      return checkpoint_error("tiktoken.model line ", line_number, ": rank ", rank,
                              " was given before, on line ", entries[index].line);
    }
    entries[index] = {begin, blob.size(), line_number};
    if (rank > highest) {
      highest = rank;
      highest_line = line_number;
    }
    ++count;
  }
  if (count == 0) return checkpoint_error("tiktoken.model: no tokens, expected 256 or more");
  // Special tokens take the ids from num_ranks on: a gap would let a rank and a special share one.
  if (highest != count - 1) {
    return checkpoint_error("tiktoken.model line ", highest_line, ": rank ", highest, " among ",
                            count, " tokens, expected each of 0 to ", count - 1, " once");
  }
  num_ranks = count;
  for (int64_t i = 0; i < count; ++i) {
    const Entry& e = entries[static_cast<size_t>(i)];
    tokens.push_back(std::string_view(blob).substr(e.begin, e.end - e.begin));
  }
  if (const int32_t twin = ranks.build(tokens); twin != RankTable::kNone) {
    const int32_t first = ranks.find(tokens[static_cast<size_t>(twin)]);
    return checkpoint_error("tiktoken.model line ", entries[static_cast<size_t>(twin)].line,
                            ": the token of rank ", twin, " is also that of rank ", first,
                            ", on line ", entries[static_cast<size_t>(first)].line);
  }
  for (int b = 0; b < 256; ++b) {
    if (ranks.byte(static_cast<unsigned char>(b)) == RankTable::kNone) {
      return checkpoint_error(
          "tiktoken.model: byte ", b,
          " has no rank of its own, expected all 256 (text could not be encoded)");
    }
  }
  return {};
}

Status Tokenizer::Impl::read_specials(std::string_view config, int64_t vocab_size) {
  K3_ASSIGN_OR_RETURN(const json root, parse_strict_json(config, "tokenizer_config.json"));
  if (!root.is_object()) return checkpoint_error("tokenizer_config.json: not a JSON object");
  const int64_t slots = vocab_size - num_ranks;
  if (slots > kMaxSpecialSlots) {
    return checkpoint_error(
        "vocab_size ", vocab_size, " leaves ", slots, " special tokens above the ", num_ranks,
        " of tiktoken.model, expected at most ", kMaxSpecialSlots, ": do the two belong together?");
  }
  std::vector<std::string> names(static_cast<size_t>(slots));
  if (const auto added = root.find("added_tokens_decoder"); added != root.end()) {
    if (!added->is_object()) {
      return checkpoint_error("tokenizer_config.json: added_tokens_decoder: ", added->type_name(),
                              ", expected an object of id -> token");
    }
    for (const auto& [key, token] : added->items()) {
      const std::string where =
          "tokenizer_config.json: added_tokens_decoder[" + excerpt(key) + "]: ";
      int64_t id = -1;
      const auto [end, error] = std::from_chars(key.data(), key.data() + key.size(), id);
      if (error != std::errc() || end != key.data() + key.size() || id < 0) {
        return checkpoint_error(where, "not a token id");
      }
      const auto content = token.is_object() ? token.find("content") : token.end();
      if (!token.is_object() || content == token.end() || !content->is_string() ||
          content->get_ref<const std::string&>().empty()) {
        return checkpoint_error(where, "expected an object with a non-empty string `content`");
      }
      const std::string& name = content->get_ref<const std::string&>();
      if (id < num_ranks) {
        return checkpoint_error(where, "special token ", excerpt(name),
                                " has the id of a rank, expected ", num_ranks, " or more");
      }
      if (id >= vocab_size) {
        return checkpoint_error(where, "special token ", excerpt(name), " is beyond vocab_size ",
                                vocab_size);
      }
      std::string& slot = names[static_cast<size_t>(id - num_ranks)];
      if (!slot.empty()) return checkpoint_error(where, "id ", id, " was given before");
      slot = name;
    }
  }
  // K3's named specials begin where its ranks end, so a vocabulary cut off at a line shows here.
  const auto first = std::find_if(names.begin(), names.end(), [](auto& n) { return !n.empty(); });
  if (first != names.end() && first != names.begin()) {
    return checkpoint_error("tiktoken.model: ", num_ranks, " tokens, but tokenizer_config.json's ",
                            "first special token ", excerpt(*first), " has id ",
                            num_ranks + (first - names.begin()),
                            ", expected one to follow the other: is the file whole?");
  }
  size_t total = 0;
  for (size_t i = 0; i < names.size(); ++i) {
    if (names[i].empty()) {
      names[i] = cat("<|reserved_token_", num_ranks + static_cast<int64_t>(i), "|>");
    }
    total += names[i].size();
  }
  special_blob.reserve(total);  // the views below stay valid
  for (size_t i = 0; i < names.size(); ++i) {
    const auto id = static_cast<int32_t>(num_ranks + static_cast<int64_t>(i));
    const size_t begin = special_blob.size();
    special_blob += names[i];
    const std::string_view name = std::string_view(special_blob).substr(begin);
    tokens.push_back(name);
    if (const auto [other, is_new] = specials.emplace(name, id); !is_new) {
      return checkpoint_error("tokenizer_config.json: added_tokens_decoder: ids ", other->second,
                              " and ", id, " are both ", excerpt(name));
    }
    special_sizes.push_back(name.size());
    begins_special[static_cast<unsigned char>(name[0])] = true;
  }
  std::sort(special_sizes.begin(), special_sizes.end(), std::greater<>());
  special_sizes.erase(std::unique(special_sizes.begin(), special_sizes.end()), special_sizes.end());
  const auto id_of = [this](std::string_view name) {
    const auto found = specials.find(name);
    return found == specials.end() ? -1 : found->second;
  };
  markup.bos = id_of("[BOS]");
  markup.eos = id_of("[EOS]");
  markup.end_of_msg = id_of("<|end_of_msg|>");
  markup.open = id_of("<|open|>");
  markup.close = id_of("<|close|>");
  markup.sep = id_of("<|sep|>");
  return {};
}

int32_t Tokenizer::Impl::special_at(std::string_view text, size_t i) const {
  if (!begins_special[static_cast<unsigned char>(text[i])]) return -1;
  for (const size_t size : special_sizes) {
    if (size > text.size() - i) continue;
    const auto found = specials.find(text.substr(i, size));
    if (found != specials.end()) return found->second;
  }
  return -1;
}

Tokenizer::Tokenizer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Tokenizer::~Tokenizer() = default;

Result<std::shared_ptr<const Tokenizer>> Tokenizer::load(const std::string& model_dir,
                                                         int64_t vocab_size) {
  K3_ASSIGN_OR_RETURN(const std::string ranks,
                      read_text_file(model_dir + "/tiktoken.model", kMaxFileBytes));
  K3_ASSIGN_OR_RETURN(const std::string config,
                      read_text_file(model_dir + "/tokenizer_config.json", kMaxFileBytes));
  auto tokenizer = parse(ranks, config, vocab_size);
  if (!tokenizer.ok()) {
    return Status(tokenizer.status().code(), model_dir + ": " + tokenizer.status().message());
  }
  return tokenizer;
}

Result<std::shared_ptr<const Tokenizer>> Tokenizer::parse(std::string_view tiktoken_model,
                                                          std::string_view tokenizer_config_json,
                                                          int64_t vocab_size) {
  if (vocab_size < 1 || vocab_size > INT32_MAX) {
    return checkpoint_error("vocab_size ", vocab_size, ", expected 1 to 2147483647");
  }
  auto impl = std::make_unique<Impl>();
  K3_RETURN_IF_ERROR(impl->read_ranks(tiktoken_model, vocab_size));
  K3_RETURN_IF_ERROR(impl->read_specials(tokenizer_config_json, vocab_size));
  return std::shared_ptr<const Tokenizer>(new Tokenizer(std::move(impl)));
}

std::vector<int32_t> Tokenizer::encode(std::string_view text) const {
  std::vector<int32_t> ids;
  ids.reserve(text.size() / 3 + 1);
  encode_append(text, &ids);
  return ids;
}

void Tokenizer::encode_append(std::string_view text, std::vector<int32_t>* ids) const {
  for_each_slice(text, [this, ids](std::string_view slice) { impl_->encode_slice(slice, ids); });
}

std::vector<int32_t> Tokenizer::encode_with_special(std::string_view text) const {
  std::vector<int32_t> ids;
  for_each_slice(text, [this, &ids](std::string_view slice) {
    size_t begin = 0;
    for (size_t i = 0; i < slice.size();) {
      const int32_t id = impl_->special_at(slice, i);
      if (id < 0) {
        ++i;
        continue;
      }
      impl_->encode_slice(slice.substr(begin, i - begin), &ids);
      ids.push_back(id);
      i += token_bytes(id).size();
      begin = i;
    }
    impl_->encode_slice(slice.substr(begin), &ids);
  });
  return ids;
}

std::string_view Tokenizer::token_bytes(int32_t id) const {
  if (id < 0 || static_cast<size_t>(id) >= impl_->tokens.size()) return {};
  return impl_->tokens[static_cast<size_t>(id)];
}

bool Tokenizer::is_special(int32_t id) const { return id >= impl_->num_ranks; }
int64_t Tokenizer::num_ranks() const { return impl_->num_ranks; }
int64_t Tokenizer::vocab_size() const { return static_cast<int64_t>(impl_->tokens.size()); }

std::optional<int32_t> Tokenizer::special_id(std::string_view content) const {
  const auto found = impl_->specials.find(content);
  if (found == impl_->specials.end()) return std::nullopt;
  return found->second;
}

std::string Tokenizer::decode(const std::vector<int32_t>& ids, bool skip_special_tokens) const {
  Utf8Stream stream;
  std::string text;
  for (const int32_t id : ids) {
    if (skip_special_tokens && is_special(id)) continue;
    text += stream.push(token_bytes(id));
  }
  text += stream.flush();
  return text;
}

const Tokenizer::Markup& Tokenizer::markup() const { return impl_->markup; }

}  // namespace k3
