// Where the weights of a model come from, by name: a mapped checkpoint, or a recipe that makes them
// up (synthetic_source.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "checkpoint/synth_values.h"
#include "core/dtype.h"

namespace k3 {

// One tensor: row-major, little-endian, read-only, alive as long as its source.
struct TensorView {
  // In host memory, MAYBE UNALIGNED: a safetensors file whose header is not padded loads too, so
  // read elements through memcpy or unaligned loads, never through a cast pointer. Null: not in
  // memory, see TensorSource::read.
  const std::byte* data = nullptr;
  DType dtype = DType::kBF16;
  std::vector<int64_t> shape;
  int64_t bytes = 0;
  std::string_view name;  // canonical
};

class TensorSource {
 public:
  virtual ~TensorSource() = default;
  // nullptr if this rank does not hold it. dtype and shape are those of the manifest, always.
  virtual const TensorView* find(std::string_view canonical_name) const = 0;
  // Bytes [first, first + bytes) of the tensor; any thread. Both multiples of 8 except at its end.
  virtual void read(const TensorView& tensor, int64_t first, int64_t bytes,
                    std::byte* out) const = 0;
  // How to make the bytes up, for a device that can do it itself; null: only read() has them.
  virtual const SynthTensor* recipe(const TensorView& /*tensor*/) const { return nullptr; }
};

}  // namespace k3
