// The memory of one rank that its peers write: the one authority for its layout. Offsets follow
// from the shape alone, so every rank computes every peer's addresses without asking, and all of it
// is sized for the most rows the protocol allows, so nothing is allocated in a step.
//
//   flags    [world]                       dispatch and return generation of each peer, a line each
//   headers  [world]                       what the peer's dispatch holds
//   row_ids  [world][max_rows]             i32: the peer's own number of each row it sent
//   topk_ids [world][max_rows][top_k]      i32: global expert ids
//   latents  [world][max_rows][latent]     f32
//   returned [max_rows][top_k][latent]     f32: expert outputs for this rank's own rows
//
// Who writes: section [r] of the first five is rank r's alone; a (row, slot) of `returned` is
// written by the owner of the expert in that slot alone. When: docs/ep.md.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

#include "core/status.h"

namespace k3 {

struct SlabShape {
  int64_t world = 1;
  int64_t max_rows = 0;
  int64_t top_k = 0;
  int64_t latent = 0;
};

struct alignas(64) SlabFlags {
  std::atomic<uint64_t> dispatched{0};  // generation of the newest dispatch from this peer
  std::atomic<uint64_t> returned{0};    // generation of the newest return from this peer
};

struct alignas(64) SlabHeader {
  int64_t layer = 0;  // of the call: both sides must be at the same layer (launch-count guard)
  int64_t rows = 0;   // rows sent
};

struct SlabLayout {
  explicit SlabLayout(const SlabShape& s) : shape(s) {
    const auto place = [this](int64_t size) {
      const int64_t at = bytes;
      bytes += (size + 63) / 64 * 64;
      return at;
    };
    const int64_t rows = s.world * s.max_rows;
    flags = place(s.world * static_cast<int64_t>(sizeof(SlabFlags)));
    headers = place(s.world * static_cast<int64_t>(sizeof(SlabHeader)));
    row_ids = place(rows * 4);
    topk_ids = place(rows * s.top_k * 4);
    latents = place(rows * s.latent * 4);
    returned = place(s.max_rows * s.top_k * s.latent * 4);
  }
  SlabShape shape;
  int64_t flags = 0, headers = 0, row_ids = 0, topk_ids = 0, latents = 0, returned = 0;
  int64_t bytes = 0;
};

class Slab {
 public:
  static Result<std::unique_ptr<Slab>> create(const SlabShape& shape) {
    std::unique_ptr<Slab> slab(new Slab(shape));
    // One line more than the layout: calloc aligns to 16, and only calloc's pages cost nothing
    // until they are touched.
    const auto bytes = static_cast<size_t>(slab->layout_.bytes + 64);
    slab->memory_.reset(static_cast<std::byte*>(std::calloc(bytes, 1)));
    if (!slab->memory_) {
      return Status(ErrorCode::kMemory,
                    cat("expert-parallel slab: cannot allocate ", bytes, " bytes"));
    }
    void* p = slab->memory_.get();
    size_t room = bytes;
    slab->base_ =
        static_cast<std::byte*>(std::align(64, static_cast<size_t>(slab->layout_.bytes), p, room));
    for (int64_t r = 0; r < shape.world; ++r) {
      new (slab->base_ + slab->layout_.flags + r * static_cast<int64_t>(sizeof(SlabFlags)))
          SlabFlags;
      new (slab->base_ + slab->layout_.headers + r * static_cast<int64_t>(sizeof(SlabHeader)))
          SlabHeader;
    }
    return slab;
  }

  const SlabLayout& layout() const { return layout_; }
  SlabFlags& flags(int64_t from) { return at<SlabFlags>(layout_.flags)[from]; }
  SlabHeader& header(int64_t from) { return at<SlabHeader>(layout_.headers)[from]; }
  int32_t* row_ids(int64_t from) { return at<int32_t>(layout_.row_ids) + from * s_.max_rows; }
  int32_t* topk_ids(int64_t from) {
    return at<int32_t>(layout_.topk_ids) + from * s_.max_rows * s_.top_k;
  }
  float* latents(int64_t from) {
    return at<float>(layout_.latents) + from * s_.max_rows * s_.latent;
  }
  float* returned() { return at<float>(layout_.returned); }

 private:
  explicit Slab(const SlabShape& shape) : s_(shape), layout_(shape) {}
  template <typename T>
  T* at(int64_t offset) {
    return reinterpret_cast<T*>(base_ + offset);
  }
  struct Free {
    void operator()(std::byte* p) const { std::free(p); }
  };
  SlabShape s_;
  SlabLayout layout_;
  std::unique_ptr<std::byte, Free> memory_;
  std::byte* base_ = nullptr;
};

}  // namespace k3
