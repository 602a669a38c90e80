// tiktoken BPE with K3's pre-tokeniser, for any vocabulary in that format (docs/text.md).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/status.h"

namespace k3 {

class Tokenizer {
 public:
  // Reads DIR/tiktoken.model and DIR/tokenizer_config.json. Errors (kCheckpoint): missing file, Git
  // LFS pointer, bad base64 or rank with its line, duplicate rank or token, a special token that
  // clashes with a rank, ids beyond vocab_size.
  static Result<std::shared_ptr<const Tokenizer>> load(const std::string& model_dir,
                                                       int64_t vocab_size);
  // The same from memory, for tests and fuzzing.
  static Result<std::shared_ptr<const Tokenizer>> parse(std::string_view tiktoken_model,
                                                        std::string_view tokenizer_config_json,
                                                        int64_t vocab_size);
  ~Tokenizer();

  // Ordinary text: never yields a special id, whatever the text says. Any bytes are accepted; what
  // is not UTF-8 is encoded byte for byte.
  std::vector<int32_t> encode(std::string_view text) const;
  void encode_append(std::string_view text, std::vector<int32_t>* ids) const;

  // Text in which the spelling of special tokens is honoured (what `--special` and /tokenize with
  // parse_special ask for; never used for user text by the chat renderer).
  std::vector<int32_t> encode_with_special(std::string_view text) const;

  // The bytes of one token, possibly part of a UTF-8 character; a special token's spelling.
  std::string_view token_bytes(int32_t id) const;
  bool is_special(int32_t id) const;  // id >= number of BPE ranks
  int64_t num_ranks() const;
  int64_t vocab_size() const;
  std::optional<int32_t> special_id(std::string_view content) const;
  // Bytes of all, then invalid UTF-8 replaced by U+FFFD.
  std::string decode(const std::vector<int32_t>& ids, bool skip_special_tokens) const;

  // K3's markup tokens; -1 where the vocabulary has none (then chat is refused).
  struct Markup {
    int32_t bos = -1, eos = -1, end_of_msg = -1, open = -1, close = -1, sep = -1;
  };
  const Markup& markup() const;

 private:
  struct Impl;
  explicit Tokenizer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Splits text into the pieces BPE works on, giant inputs sliced first as the reference slices them
// (docs/text.md#pre-tokeniser, #slices). The pieces join to the text. Linear in the input.
std::vector<std::string_view> pre_tokenize(std::string_view text);

// Incremental, UTF-8-safe detokeniser: bytes in, complete characters out.
class Utf8Stream {
 public:
  // Appends bytes; returns what is complete. Bytes that can no longer become a character come out
  // as U+FFFD (one per maximal invalid prefix, as WHATWG and Python's "replace" do).
  std::string push(std::string_view bytes);
  // The rest; an unfinished character becomes one U+FFFD.
  std::string flush();

 private:
  std::string tail_;
};

}  // namespace k3
