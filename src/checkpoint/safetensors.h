// The safetensors container: eight bytes of header length, a JSON header, then the payload. This
// file knows the format and nothing of K3.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/status.h"

namespace k3 {

struct SafetensorsTensor {
  std::string name;
  std::string dtype;  // a name of the format: "BF16", "F32", "U8", "F8_E4M3", ...
  std::vector<int64_t> shape;
  int64_t begin = 0;  // byte offsets from the start of the FILE; end - begin == shape * dtype
  int64_t end = 0;
};

struct SafetensorsHeader {
  int64_t payload_begin = 0;               // 8 + header length; need not be aligned to anything
  std::vector<SafetensorsTensor> tensors;  // ascending by begin
};

// Headers longer than this are refused, as the reference implementation does.
inline constexpr int64_t kMaxSafetensorsHeader = 100'000'000;

// `header_json` is the header's text, `file_size` the size of the whole file. Checked: JSON
// (bounded depth, each name once), dtype names, shape and offset arithmetic without overflow, begin
// <= end, size == shape * dtype, and that the tensors cover the payload exactly: in range, no
// overlap, no hole, nothing behind the last one. Errors: kCheckpoint, starting with `origin`.
Result<SafetensorsHeader> parse_safetensors_header(std::string_view header_json, int64_t file_size,
                                                   const std::string& origin);

// Reads the header of one file and nothing else of it. Further errors: missing, empty, too short, a
// Git LFS pointer, a header length that does not fit the file.
Result<SafetensorsHeader> read_safetensors_header(const std::string& path);

}  // namespace k3
