// Any bytes as a safetensors header: refused, or every tensor lies inside the file.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "checkpoint/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  // The first two bytes choose the payload size, so that accepted headers are reachable.
  const int64_t payload = data[0] | data[1] << 8;
  const std::string_view header(reinterpret_cast<const char*>(data + 2), size - 2);
  const int64_t file_size = 8 + static_cast<int64_t>(header.size()) + payload;
  const auto r = k3::parse_safetensors_header(header, file_size, "fuzz");
  if (!r.ok()) {
    if (r.status().message().empty()) std::abort();
    return 0;
  }
  int64_t at = r->payload_begin;
  for (const k3::SafetensorsTensor& t : r->tensors) {
    if (t.begin != at || t.end < t.begin || t.end > file_size) std::abort();
    at = t.end;
  }
  if (at != file_size) std::abort();
  return 0;
}
