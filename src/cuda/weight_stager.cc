#include "cuda/weight_stager.h"

#include <algorithm>

#include "cuda/kernels/synth.h"

namespace k3::cuda {
namespace {

// More readers than this do not make memory faster.
int reader_threads() { return std::min(available_cores(), 16); }

}  // namespace

WeightStager::WeightStager(const TensorSource& source)
    : source_(source), readers_(reader_threads()) {}

Status WeightStager::create(int64_t chunk_bytes) {
  chunk_bytes_ = chunk_bytes;
  for (Slot& slot : slots_) {
    K3_RETURN_IF_ERROR(slot.stream.create());
    slot.arena.take<std::byte>(chunk_bytes);
    K3_RETURN_IF_ERROR(slot.arena.allocate("weight staging"));
    slot.device = slot.arena.take<std::byte>(chunk_bytes);
    K3_RETURN_IF_ERROR(slot.host.allocate("weight staging", chunk_bytes));
  }
  return {};
}

Status WeightStager::read(const Piece& piece, std::byte* out) {
  constexpr int64_t kPart = 1 << 20;
  readers_.parallel_for((piece.bytes + kPart - 1) / kPart, [&](int64_t i, int) {
    const int64_t at = i * kPart;
    source_.read(*piece.tensor, piece.first + at, std::min(kPart, piece.bytes - at), out + at);
  });
  return {};
}

Result<WeightStager::Chunk> WeightStager::stage(std::initializer_list<Piece> pieces) {
  Slot& slot = slots_[next_];
  next_ = (next_ + 1) % kChunks;
  K3_RETURN_IF_ERROR(slot.stream.synchronize("weight staging"));
  Chunk chunk;
  chunk.stream = slot.stream.get();
  int64_t at = 0, copied = 0;
  int index = 0;
  for (const Piece& piece : pieces) {
    if (at + piece.bytes > chunk_bytes_) {
      return Status(ErrorCode::kInternal, cat("weight staging: chunk of ", at + piece.bytes,
                                              " bytes, expected at most ", chunk_bytes_));
    }
    chunk.piece[index++] = slot.device + at;
    if (const SynthTensor* recipe = source_.recipe(*piece.tensor)) {
      K3_RETURN_IF_ERROR(
          fill_synthetic(*recipe, piece.first, piece.bytes, slot.device + at, chunk.stream));
    } else {
      K3_RETURN_IF_ERROR(read(piece, slot.host.data() + at));
      copied = at + piece.bytes;
    }
    staged_bytes_ += piece.bytes;
    at = aligned(at + piece.bytes);
  }
  if (copied > 0) {
    K3_RETURN_IF_ERROR(cuda_check(
        "weight copy", cudaMemcpyAsync(slot.device, slot.host.data(), static_cast<size_t>(copied),
                                       cudaMemcpyHostToDevice, chunk.stream)));
  }
  return chunk;
}

Status WeightStager::finish() {
  for (Slot& slot : slots_) K3_RETURN_IF_ERROR(slot.stream.synchronize("weight staging"));
  return {};
}

}  // namespace k3::cuda
