// Tensors on their way to the card: read into pinned memory by several threads, copied, and packed
// from there by a kernel, three chunks in flight. A synthetic source is made up on the card.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "checkpoint/tensor_source.h"
#include "core/status.h"
#include "core/thread_pool.h"
#include "cuda/device_memory.h"

namespace k3::cuda {

class WeightStager {
 public:
  static constexpr int kChunks = 3;

  explicit WeightStager(const TensorSource& source);
  // `chunk_bytes`: the largest stage().
  Status create(int64_t chunk_bytes);

  // Bytes [first, first + bytes) of a tensor; both multiples of 8 except at its end.
  struct Piece {
    const TensorView* tensor = nullptr;
    int64_t first = 0, bytes = 0;
  };
  // The pieces in device memory, each at a multiple of 256 bytes.
  struct Chunk {
    std::byte* piece[8] = {};
    cudaStream_t stream = nullptr;  // work that reads them goes here
  };
  Result<Chunk> stage(std::initializer_list<Piece> pieces);
  // Waits for everything.
  Status finish();

  static int64_t aligned(int64_t bytes) { return (bytes + 255) / 256 * 256; }
  int64_t chunk_bytes() const { return chunk_bytes_; }
  int64_t staged_bytes() const { return staged_bytes_; }

 private:
  struct Slot {
    PinnedBuffer host;
    DeviceArena arena;
    std::byte* device = nullptr;
    Stream stream;
  };
  Status read(const Piece& piece, std::byte* out);

  const TensorSource& source_;
  ThreadPool readers_;
  Slot slots_[kChunks];
  int next_ = 0;
  int64_t chunk_bytes_ = 0, staged_bytes_ = 0;
};

}  // namespace k3::cuda
