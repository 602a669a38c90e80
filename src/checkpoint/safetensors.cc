#include "checkpoint/safetensors.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/strict_json.h"

namespace k3 {
namespace {

using nlohmann::json;

struct DTypeBits {
  const char* name;
  int bits;
};
constexpr DTypeBits kDTypes[] = {
    {"BOOL", 8}, {"F4", 4},    {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"U8", 8},
    {"I8", 8},   {"U16", 16},  {"I16", 16},    {"F8_E5M2", 8}, {"F8_E4M3", 8},
    {"F16", 16}, {"BF16", 16}, {"U32", 32},    {"I32", 32},    {"F8_E8M0", 8},
    {"F32", 32}, {"U64", 64},  {"I64", 64},    {"F64", 64},    {"C64", 64},
};

// Bits of one element, 0 for an unknown name.
int dtype_bits(const std::string& name) {
  for (const DTypeBits& d : kDTypes) {
    if (name == d.name) return d.bits;
  }
  return 0;
}

// A JSON number that is a non-negative int64.
bool to_size(const json& value, int64_t* out) {
  if (!value.is_number_unsigned()) return false;
  const uint64_t wide = value.get<uint64_t>();
  if (wide > static_cast<uint64_t>(INT64_MAX)) return false;
  *out = static_cast<int64_t>(wide);
  return true;
}

Status parse_tensor(const std::string& origin, const std::string& name, const json& entry,
                    int64_t payload_begin, int64_t payload_bytes, SafetensorsTensor* out) {
  const std::string where = cat(origin, ": tensor ", name, ": ");
  if (!entry.is_object()) {
    return checkpoint_error(where, "found ", describe_json(entry), ", expected an object");
  }
  for (const char* key : {"dtype", "shape", "data_offsets"}) {
    if (!entry.contains(key)) return checkpoint_error(where, "missing ", key);
  }
  const json& dtype = entry["dtype"];
  if (!dtype.is_string()) {
    return checkpoint_error(where, "dtype: found ", describe_json(dtype), ", expected a string");
  }
  out->dtype = dtype.get<std::string>();
  const int bits = dtype_bits(out->dtype);
  if (bits == 0) {
    return checkpoint_error(where, "dtype: found ", describe_json(dtype),
                            ", which is no dtype of the safetensors format");
  }

  const json& shape = entry["shape"];
  constexpr size_t kMaxRank = 16;
  if (!shape.is_array() || shape.size() > kMaxRank) {
    return checkpoint_error(where, "shape: found ", describe_json(shape),
                            ", expected a list of at most ", kMaxRank, " sizes");
  }
  int64_t total_bits = bits;
  for (const json& dim : shape) {
    int64_t size = 0;
    if (!to_size(dim, &size)) {
      return checkpoint_error(where, "shape: found ", describe_json(shape),
                              ", expected non-negative integers");
    }
    if (__builtin_mul_overflow(total_bits, size, &total_bits)) {
      return checkpoint_error(where, "shape: found ", describe_json(shape), ", which overflows");
    }
    out->shape.push_back(size);
  }
  if (total_bits % 8 != 0) {
    return checkpoint_error(where, "shape: found ", describe_json(shape), " of ", out->dtype,
                            ", expected whole bytes");
  }

  const json& offsets = entry["data_offsets"];
  int64_t begin = 0, end = 0;
  if (!offsets.is_array() || offsets.size() != 2 || !to_size(offsets[0], &begin) ||
      !to_size(offsets[1], &end)) {
    return checkpoint_error(where, "data_offsets: found ", describe_json(offsets),
                            ", expected [begin, end]");
  }
  if (begin > end) {
    return checkpoint_error(where, "data_offsets: found ", describe_json(offsets),
                            ", expected begin <= end");
  }
  if (end - begin != total_bits / 8) {
    return checkpoint_error(where, "data_offsets: found ", end - begin, " bytes, expected ",
                            total_bits / 8, " for shape ", describe_json(shape), " of ",
                            out->dtype);
  }
  if (end > payload_bytes) {
    return checkpoint_error(where, "data_offsets: found end ", end, ", but the file holds ",
                            payload_bytes, " payload bytes (truncated?)");
  }
  out->name = name;
  out->begin = payload_begin + begin;
  out->end = payload_begin + end;
  return {};
}

}  // namespace

Result<SafetensorsHeader> parse_safetensors_header(std::string_view header_json, int64_t file_size,
                                                   const std::string& origin) {
  SafetensorsHeader header;
  header.payload_begin = 8 + static_cast<int64_t>(header_json.size());
  const int64_t payload_bytes = file_size - header.payload_begin;
  if (payload_bytes < 0) {
    return checkpoint_error(origin, ": header of ", header_json.size(), " bytes in a file of ",
                            file_size, " (truncated?)");
  }
  if (!header_json.starts_with('{')) {
    return checkpoint_error(origin, ": the header does not start with '{'");
  }
  K3_ASSIGN_OR_RETURN(const json root, parse_strict_json(header_json, origin + ": header", 8));
  header.tensors.reserve(root.size());
  for (const auto& item : root.items()) {
    if (item.key() == "__metadata__") {
      const json& metadata = item.value();
      const bool strings_only =
          metadata.is_object() && std::all_of(metadata.begin(), metadata.end(),
                                              [](const json& v) { return v.is_string(); });
      if (!strings_only) {
        return checkpoint_error(origin, ": __metadata__: found ", describe_json(metadata),
                                ", expected an object of strings");
      }
      continue;
    }
    SafetensorsTensor tensor;
    K3_RETURN_IF_ERROR(parse_tensor(origin, item.key(), item.value(), header.payload_begin,
                                    payload_bytes, &tensor));
    header.tensors.push_back(std::move(tensor));
  }

  std::sort(header.tensors.begin(), header.tensors.end(),
            [](const SafetensorsTensor& a, const SafetensorsTensor& b) {
              return a.begin != b.begin ? a.begin < b.begin : a.end < b.end;
            });
  int64_t at = header.payload_begin;
  const std::string* previous = nullptr;
  for (const SafetensorsTensor& t : header.tensors) {
    if (t.begin < at) {
      return checkpoint_error(origin, ": tensor ", t.name, " overlaps tensor ", *previous);
    }
    if (t.begin > at) {
      return checkpoint_error(origin, ": ", t.begin - at, " bytes before tensor ", t.name,
                              " belong to no tensor");
    }
    at = t.end;
    previous = &t.name;
  }
  if (at != file_size) {
    return checkpoint_error(origin, ": ", file_size - at,
                            " bytes behind the last tensor belong to no tensor");
  }
  return header;
}

Result<SafetensorsHeader> read_safetensors_header(const std::string& path) {
  std::error_code ec;
  const auto status = std::filesystem::status(path, ec);
  if (!std::filesystem::exists(status)) return checkpoint_error(path, ": no such file");
  if (!std::filesystem::is_regular_file(status)) {
    return checkpoint_error(path, ": not a regular file");
  }
  const uintmax_t wide_size = std::filesystem::file_size(path, ec);
  if (ec) return checkpoint_error(path, ": ", ec.message());
  const auto size = static_cast<int64_t>(wide_size);
  if (size == 0) return checkpoint_error(path, ": the file is empty");
  std::ifstream in(path, std::ios::binary);
  if (!in) return checkpoint_error(path, ": cannot open: ", std::strerror(errno));

  // Enough for the length and to recognise a Git LFS pointer, whose first bytes would otherwise
  // read as a header of some 10^18 bytes.
  char begin[64] = {};
  in.read(begin, sizeof(begin));
  const auto got = static_cast<size_t>(in.gcount());
  if (is_lfs_pointer({begin, got})) {
    return checkpoint_error(path, ": a Git LFS pointer, not the file itself (git lfs pull)");
  }
  if (got < 8) {
    return checkpoint_error(path, ": ", size, " bytes, expected at least 8 (truncated?)");
  }
  uint64_t length = 0;
  for (int i = 7; i >= 0; --i) length = length << 8 | static_cast<unsigned char>(begin[i]);
  if (length > static_cast<uint64_t>(kMaxSafetensorsHeader)) {
    return checkpoint_error(path, ": header length: found ", length, ", expected at most ",
                            kMaxSafetensorsHeader, " (not a safetensors file?)");
  }
  if (static_cast<int64_t>(length) > size - 8) {
    return checkpoint_error(path, ": header length: found ", length, ", but the file has ", size,
                            " bytes (truncated?)");
  }
  std::string text(static_cast<size_t>(length), '\0');
  in.clear();
  in.seekg(8);
  in.read(text.data(), static_cast<std::streamsize>(length));
  if (in.gcount() != static_cast<std::streamsize>(length)) {
    return checkpoint_error(path, ": read ", in.gcount(), " of ", length, " header bytes");
  }
  return parse_safetensors_header(text, size, path);
}

}  // namespace k3
