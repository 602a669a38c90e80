#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <nlohmann/json.hpp>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "checkpoint/synth.h"

namespace k3 {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kChunkBytes = int64_t{4} << 20;
constexpr int64_t kMinVocab = 264;  // 256 bytes, six markup tokens, [UNK], [PAD]

struct Placed {
  TensorSpec spec;
  int64_t offset;  // in the shard's payload
};
struct Shard {
  std::vector<Placed> tensors;
  int64_t payload = 0;
};

std::vector<Shard> split_into_shards(const ModelConfig& config, int64_t max_bytes) {
  std::vector<Shard> shards(1);
  for_each_tensor(config, [&](const TensorSpec& spec) {
    if (shards.back().payload > 0 && shards.back().payload + spec.bytes > max_bytes) {
      shards.emplace_back();
    }
    Shard& shard = shards.back();
    shard.tensors.push_back({spec, shard.payload});
    shard.payload += spec.bytes;
  });
  return shards;
}

std::string shard_name(size_t number, size_t count) {
  char text[64];
  std::snprintf(text, sizeof(text), "model-%05zu-of-%06zu.safetensors", number + 1, count);
  return text;
}

// Manifest names need no JSON escapes.
std::string shard_header(const Shard& shard, std::string_view prefix) {
  std::string json = "{";
  for (const Placed& t : shard.tensors) {
    if (json.size() > 1) json += ',';
    json += cat("\"", prefix, t.spec.name, "\":{\"dtype\":\"", dtype_name(t.spec.dtype),
                "\",\"shape\":", shape_text(t.spec.shape), ",\"data_offsets\":[", t.offset, ",",
                t.offset + t.spec.bytes, "]}");
  }
  json += '}';
  json.resize((json.size() + 7) / 8 * 8, ' ');  // payload aligned to 8 in the file
  std::string out(8, '\0');
  for (int i = 0; i < 8; ++i) out[static_cast<size_t>(i)] = static_cast<char>(json.size() >> 8 * i);
  return out + json;
}

class File {
 public:
  explicit File(std::string path) : path_(std::move(path)) {}
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() {
    if (fd_ >= 0) ::close(fd_);
  }
  Status create() {
    fd_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    if (fd_ < 0) return problem("create");
    return {};
  }
  Status write_at(const void* data, int64_t bytes, int64_t offset) const {
    const auto* at = static_cast<const char*>(data);
    while (bytes > 0) {
      const ssize_t n = ::pwrite(fd_, at, static_cast<size_t>(bytes), offset);
      if (n < 0) {
        if (errno == EINTR) continue;
        return problem("write");
      }
      at += n;
      bytes -= n;
      offset += n;
    }
    return {};
  }
  Status close() {
    const int fd = std::exchange(fd_, -1);
    if (::close(fd) != 0) return problem("close");
    return {};
  }

 private:
  Status problem(const char* verb) const {
    const ErrorCode code =
        errno == ENOSPC || errno == EDQUOT ? ErrorCode::kMemory : ErrorCode::kInvalidArgument;
    return {code, cat(path_, ": cannot ", verb, ": ", std::strerror(errno))};
  }
  const std::string path_;
  int fd_ = -1;
};

Status write_text(const fs::path& path, const std::string& text) {
  File file(path.string());
  K3_RETURN_IF_ERROR(file.create());
  K3_RETURN_IF_ERROR(file.write_at(text.data(), static_cast<int64_t>(text.size()), 0));
  return file.close();
}

// Consecutive pieces of tensors that are generated into one buffer and written at once.
struct Chunk {
  struct Piece {
    size_t tensor;
    int64_t first, bytes;
  };
  std::vector<Piece> pieces;
  int64_t offset = 0;  // in the payload
  int64_t bytes = 0;
};

std::vector<Chunk> split_into_chunks(const Shard& shard) {
  std::vector<Chunk> chunks;
  for (size_t i = 0; i < shard.tensors.size(); ++i) {
    const Placed& t = shard.tensors[i];
    for (int64_t first = 0; first < t.spec.bytes; first += kChunkBytes) {
      const int64_t bytes = std::min(kChunkBytes, t.spec.bytes - first);
      if (chunks.empty() || chunks.back().bytes + bytes > kChunkBytes) {
        chunks.push_back({{}, t.offset + first, 0});
      }
      chunks.back().pieces.push_back({i, first, bytes});
      chunks.back().bytes += bytes;
    }
  }
  return chunks;
}

class Writer {
 public:
  Writer(const SynthOptions& options, const ModelConfig& config, int64_t total,
         const ProgressFn& progress)
      : options_(options), config_(config), total_(total), progress_(progress) {
    const unsigned cores = std::max(1u, std::thread::hardware_concurrency());
    num_threads_ = options.num_threads > 0 ? options.num_threads : static_cast<int>(cores);
  }

  Status write_shard(const Shard& shard, const fs::path& path) {
    File file(path.string());
    K3_RETURN_IF_ERROR(file.create());
    const std::string header =
        shard_header(shard, options_.language_model_prefix ? kTextPrefix : std::string_view());
    const auto payload_begin = static_cast<int64_t>(header.size());
    K3_RETURN_IF_ERROR(file.write_at(header.data(), payload_begin, 0));

    std::vector<SynthTensor> fills;
    fills.reserve(shard.tensors.size());
    for (const Placed& t : shard.tensors) {
      fills.push_back(synth_tensor(config_, t.spec, options_.seed));
    }
    const std::vector<Chunk> chunks = split_into_chunks(shard);
    std::atomic<size_t> next{0};
    std::atomic<bool> failed{false};
    std::mutex mutex;
    Status first_error;
    const auto work = [&](bool reports) {
      std::vector<std::byte> buffer(static_cast<size_t>(kChunkBytes));
      for (size_t i; !failed && (i = next++) < chunks.size();) {
        const Chunk& chunk = chunks[i];
        std::byte* at = buffer.data();
        for (const Chunk::Piece& piece : chunk.pieces) {
          synth_fill(fills[piece.tensor], piece.first, piece.bytes, at);
          at += piece.bytes;
        }
        if (Status s = file.write_at(buffer.data(), chunk.bytes, payload_begin + chunk.offset);
            !s.ok()) {
          const std::lock_guard lock(mutex);
          if (!failed.exchange(true)) first_error = std::move(s);
          return;
        }
        const int64_t done = done_ += chunk.bytes;
        if (reports && progress_ && done < total_) progress_(done, total_);
      }
    };
    std::vector<std::thread> helpers;
    try {
      for (int i = 1; i < num_threads_ && static_cast<size_t>(i) < chunks.size(); ++i) {
        helpers.emplace_back(work, false);
      }
    } catch (const std::system_error&) {
      // Fewer threads than wished for: the ones there are do the work.
    }
    work(true);
    for (std::thread& helper : helpers) helper.join();
    K3_RETURN_IF_ERROR(first_error);
    return file.close();
  }

 private:
  const SynthOptions& options_;
  const ModelConfig& config_;
  const int64_t total_;
  const ProgressFn& progress_;
  int num_threads_ = 1;
  std::atomic<int64_t> done_{0};
};

std::string byte_level_ranks() {
  constexpr char kDigits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string out;
  for (unsigned byte = 0; byte < 256; ++byte) {  // base64 of one byte
    out += kDigits[byte >> 2];
    out += kDigits[(byte & 3) << 4];
    out += cat("== ", byte, "\n");
  }
  return out;
}

std::string tokenizer_config(const ModelConfig& config) {
  using nlohmann::ordered_json;
  ordered_json added = ordered_json::object();
  const auto add = [&](int64_t id, const char* content, bool special) {
    added[std::to_string(id)] = {{"content", content},   {"lstrip", false},
                                 {"normalized", false},  {"rstrip", false},
                                 {"single_word", false}, {"special", special}};
  };
  add(256, "[BOS]", true);
  add(257, "[EOS]", true);
  add(258, "<|end_of_msg|>", true);
  add(259, "<|open|>", false);
  add(260, "<|close|>", false);
  add(261, "<|sep|>", false);
  add(config.vocab_size - 2, "[UNK]", true);
  add(config.vocab_size - 1, "[PAD]", true);
  const ordered_json root = {{"added_tokens_decoder", added},
                             {"bos_token", "[BOS]"},
                             {"eos_token", "[EOS]"},
                             {"unk_token", "[UNK]"},
                             {"pad_token", "[PAD]"},
                             {"model_max_length", config.max_position_embeddings},
                             {"tokenizer_class", "TikTokenTokenizer"},
                             {"clean_up_tokenization_spaces", false}};
  return root.dump(1) + "\n";
}

std::string index_json(const std::vector<Shard>& shards, std::string_view prefix, int64_t total) {
  std::vector<std::pair<std::string_view, size_t>> names;
  for (size_t s = 0; s < shards.size(); ++s) {
    for (const Placed& t : shards[s].tensors) names.emplace_back(t.spec.name, s);
  }
  std::sort(names.begin(), names.end());
  std::string out = cat("{\n\"metadata\": {\"total_size\": ", total, "},\n\"weight_map\": {\n");
  for (size_t i = 0; i < names.size(); ++i) {
    out += cat("\"", prefix, names[i].first, "\": \"", shard_name(names[i].second, shards.size()),
               i + 1 < names.size() ? "\",\n" : "\"\n");
  }
  return out + "}\n}\n";
}

}  // namespace

Status write_synthetic(const SynthOptions& options, const std::string& dir,
                       const ProgressFn& progress) {
  ModelConfig config = options.config;
  config.num_checkpoint_layers =
      config.num_hidden_layers;  // a cut config is written as a whole one
  if (config.vocab_size < kMinVocab) {
    return invalid_argument("vocab_size: found ", config.vocab_size, ", expected at least ",
                            kMinVocab, " for 256 bytes and the markup tokens");
  }
  if (options.max_shard_bytes < 1) {
    return invalid_argument("max_shard_bytes: found ", options.max_shard_bytes,
                            ", expected at least 1");
  }
  config.bos_token_id = 256;
  config.eos_token_ids = {258, 257};
  config.pad_token_id = config.vocab_size - 1;
  K3_RETURN_IF_ERROR(validate_model_config(config, "synthetic config"));

  const fs::path root(dir);
  std::error_code ec;
  fs::create_directories(root, ec);
  if (ec || !fs::is_directory(root, ec)) {
    return invalid_argument(dir, ": cannot create the directory", ec ? ": " : "",
                            ec ? ec.message() : "");
  }
  if (!fs::is_empty(root, ec) || ec) {
    return invalid_argument(dir, ": the directory is not empty, expected a new or empty one");
  }
  const int64_t total = synth_payload_bytes(config);
  const fs::space_info space = fs::space(root, ec);
  if (!ec && space.available < static_cast<uintmax_t>(total)) {
    return {ErrorCode::kMemory, cat(dir, ": ", space.available, " bytes free, expected at least ",
                                    total, " for the weights")};
  }

  const std::vector<Shard> shards = split_into_shards(config, options.max_shard_bytes);
  Writer writer(options, config, total, progress);
  for (size_t i = 0; i < shards.size(); ++i) {
    K3_RETURN_IF_ERROR(writer.write_shard(shards[i], root / shard_name(i, shards.size())));
  }
  const std::string_view prefix = options.language_model_prefix ? kTextPrefix : std::string_view();
  K3_RETURN_IF_ERROR(
      write_text(root / "model.safetensors.index.json", index_json(shards, prefix, total)));
  K3_RETURN_IF_ERROR(write_text(root / "tiktoken.model", byte_level_ranks()));
  K3_RETURN_IF_ERROR(write_text(root / "tokenizer_config.json", tokenizer_config(config)));
  K3_RETURN_IF_ERROR(write_text(root / "generation_config.json",
                                "{\n  \"eos_token_id\": [258, 257],\n  \"temperature\": 1.0,\n  "
                                "\"top_p\": 0.95\n}\n"));
  K3_RETURN_IF_ERROR(write_text(root / "config.json", model_config_to_json(config)));
  if (progress) progress(total, total);
  return {};
}

}  // namespace k3
