// Two kernels, the same bits (products.h has the order of the sum):
//
// stream_kernel: few rows, long K. Bandwidth is everything: the 16 warps of a block each stream
// their K slice of the same tile through a private ring of shared memory that runs ahead over the
// tiles of the block, so the memory system never waits for a reduction.
//
// tile_kernel: many rows, or K so short that slices are crumbs. A warp walks all K of its tile, and
// the block's warps share the columns of x in shared memory.
#include "cuda/kernels/products.h"

#include <algorithm>

#include "cuda/device.h"
#include "cuda/launch.h"

namespace k3::cuda {
namespace {

constexpr int kSlices = 16;
constexpr int kGroup = 4;                       // slices are added in groups of four
constexpr int kBlockChunks = kBlockBytes / 16;  // uint4 of a packed block
constexpr int kMaxSharedBytes = 227 * 1024;

__host__ __device__ int num_blocks(int k) { return (k + kBlockK - 1) / kBlockK; }
__device__ int slice_begin(int slice, int blocks) { return slice * blocks / kSlices; }

// 16 bytes of a row of x, elements [k, k + 8); zeros from `end` on, which are not read.
__device__ uint4 x_tail(const bf16* row, int k, int end) {
  uint32_t word[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t low = k + 2 * i < end ? row[k + 2 * i] : 0;
    const uint32_t high = k + 2 * i + 1 < end ? row[k + 2 * i + 1] : 0;
    word[i] = high << 16 | low;
  }
  return make_uint4(word[0], word[1], word[2], word[3]);
}

// Both mma steps of a block for N tiles of eight columns. The chains are independent: step 0 of all
// comes before step 1 of any.
template <int N>
__device__ __forceinline__ void mma_block(float (*acc)[4], const uint4& rows_low,
                                          const uint4& rows_high, const uint4 (&x)[N]) {
  const uint32_t a0[4] = {rows_low.x, rows_high.x, rows_low.y, rows_high.y};
  const uint32_t a1[4] = {rows_low.z, rows_high.z, rows_low.w, rows_high.w};
#pragma unroll
  for (int n = 0; n < N; ++n) mma_16x8x16(acc[n], a0, x[n].x, x[n].y);
#pragma unroll
  for (int n = 0; n < N; ++n) mma_16x8x16(acc[n], a1, x[n].z, x[n].w);
}

__device__ __forceinline__ float4 operator+(const float4& a, const float4& b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}
__device__ __forceinline__ float4 landed4(const float4& a) {
  return make_float4(landed(a.x), landed(a.y), landed(a.z), landed(a.w));
}

// --- epilogues

__device__ void store_one(const ProductOutput& o, int64_t at, float y) {
  switch (o.epilogue) {
    case Epilogue::kF32:
      static_cast<float*>(o.out)[at] = y;
      break;
    case Epilogue::kLandF32:
      static_cast<float*>(o.out)[at] = landed(y);
      break;
    case Epilogue::kSplit: {
      const float high = landed(y);
      static_cast<bf16*>(o.out)[at] = land(high);
      o.out_lo[at] = land(y - high);
      break;
    }
    case Epilogue::kGate: {
      const float s = landed(sigmoid_f32(bf16_to_float(o.gate[at])));
      static_cast<bf16*>(o.out)[at] = land(landed(y) * s);
      break;
    }
    default:
      static_cast<bf16*>(o.out)[at] = land(y);
  }
}

// A lane's part of a finished tile: y of stack rows 16 tile + g (x, y) and 16 tile + 8 + g (z, w),
// for rows `row` and `row + 1` of x.
__device__ void store_tile(const Product& p, int tile, int row, int64_t batch, const float4& y) {
  const int g = static_cast<int>(threadIdx.x) % kWarp / 4;
  for (int i = 0; i < p.num_outputs; ++i) {
    const ProductOutput& o = p.out[i];
    const int base = tile * kTileRows - o.first_row;
    if (base < 0 || base >= o.rows) continue;
    const int64_t first = batch * o.batch_stride + row * o.ld;
    const bool two = row + 1 < p.rows;
    if (row >= p.rows) return;
    if (o.epilogue == Epilogue::kSitu) {
      const int n = base / 2 + g;
      if (n >= o.rows / 2) return;
      bf16* out = static_cast<bf16*>(o.out) + first + n;
      out[0] = land(situ_f32(landed(y.x), landed(y.z), p.situ_beta, p.situ_linear_beta));
      if (two) {
        out[o.ld] = land(situ_f32(landed(y.y), landed(y.w), p.situ_beta, p.situ_linear_beta));
      }
      return;
    }
    const int n = base + g;
    if (n < o.rows) {
      store_one(o, first + n, y.x);
      if (two) store_one(o, first + o.ld + n, y.y);
    }
    if (n + 8 < o.rows) {
      store_one(o, first + n + 8, y.z);
      if (two) store_one(o, first + o.ld + n + 8, y.w);
    }
    return;
  }
}

// --- few rows

constexpr int kStreamThreads = kSlices * kWarp;
constexpr int kStreamMaxTiles = 2;  // tiles of eight columns

// With the partial sums (16 KiB a column tile, double) a block stays under half of an SM's shared
// memory: the next launch's blocks move in and start their streams while this one drains.
template <int kN>
constexpr int kRing = 7 - kN;
template <int kN>
constexpr size_t kStreamShared = kSlices*(kRing<kN>* kBlockBytes + 2 * kN * kWarp * 16);

// What a warp streams: its slice of every tile of the block, both inputs in turn.
struct Walk {
  const uint4* at = nullptr;  // this lane's first 16 bytes of the next block
  int left = 0;               // blocks of the slice
  int tile = 0;
  int part = 0;
};

__device__ __forceinline__ void open_slice(const Product& p, int slice, Walk& walk) {
  const PackedMatrix& w = walk.part == 0 ? p.in.w : p.second.w;
  const int blocks = num_blocks(w.k), begin = slice_begin(slice, blocks);
  walk.left = slice_begin(slice + 1, blocks) - begin;
  walk.at = w.data + static_cast<int64_t>(blockIdx.z) * p.w_batch_stride +
            (static_cast<int64_t>(walk.tile) * blocks + begin) * kBlockChunks + threadIdx.x % kWarp;
}

template <int kN>
__global__ void __launch_bounds__(kStreamThreads, 2)
    stream_kernel(const __grid_constant__ Product p) {
  K3_DYNAMIC_SHARED(uint4, shared);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int g = lane / 4, t = lane % 4;
  const int tiles = p.in.w.rows / kTileRows;
  const int parts = p.second.w.data != nullptr ? 2 : 1;
  uint4* ring = shared + warp * kRing<kN> * kBlockChunks + lane;  // this lane's alone: no barriers
  float4* partial = reinterpret_cast<float4*>(shared + kSlices * kRing<kN> * kBlockChunks);

  Walk walk;
  walk.tile = static_cast<int>(blockIdx.x);
  open_slice(p, warp, walk);
  const auto push = [&](int slot) {
    while (walk.left == 0 && walk.tile < tiles) {
      if (++walk.part == parts) {
        walk.part = 0;
        walk.tile += static_cast<int>(gridDim.x);
      }
      open_slice(p, warp, walk);
    }
    if (walk.tile < tiles) {
      copy_async16(ring + slot * kBlockChunks, walk.at);
      copy_async16(ring + slot * kBlockChunks + kWarp, walk.at + kWarp);
      walk.at += kBlockChunks;
      --walk.left;
    }
    copy_async_commit();
  };
  for (int slot = 0; slot < kRing<kN> - 1; ++slot) push(slot);
  wait_for_inputs();
  let_next_start();

  int slot = 0, buffer = 0, turn = 0;
  for (int tile = static_cast<int>(blockIdx.x); tile < tiles; tile += gridDim.x, ++turn) {
    float4 first = make_float4(0, 0, 0, 0);  // the landed sum of `in`, where there is a second
    for (int part = 0; part < parts; ++part) {
      const ProductInput& in = part == 0 ? p.in : p.second;
      const int k = in.w.k, blocks = num_blocks(k), end = slice_begin(warp + 1, blocks);
      const int64_t x_batch = static_cast<int64_t>(blockIdx.z) * p.x_batch_stride;
      float acc[kN][4] = {};
      for (int b = slice_begin(warp, blocks); b < end; ++b) {
        const int at = b * kBlockK + 8 * t;
        const auto load_x = [&](const bf16* plane, uint4(&x)[kN]) {
#pragma unroll
          for (int n = 0; n < kN; ++n) {
            const int row = 8 * n + g;
            const bf16* from = plane + x_batch + row * in.ldx;
            x[n] = make_uint4(0, 0, 0, 0);
            if (row < p.rows) {
              x[n] = at + 8 <= k ? *reinterpret_cast<const uint4*>(from + at) : x_tail(from, at, k);
            }
          }
        };
        uint4 x[kN];
        load_x(in.x, x);
        copy_async_wait<kRing<kN> - 2>();
        const uint4 low = ring[slot * kBlockChunks], high = ring[slot * kBlockChunks + kWarp];
        // Into the slot before this one, whose reads have been used.
        push(slot == 0 ? kRing<kN> - 1 : slot - 1);
        slot = slot + 1 == kRing<kN> ? 0 : slot + 1;
        mma_block(acc, low, high, x);
        if (in.x_lo != nullptr) {
          load_x(in.x_lo, x);
          mma_block(acc, low, high, x);
        }
      }

      float4* mine = partial + buffer * kSlices * kN * kWarp;
      buffer ^= 1;  // a buffer is written again only after the barrier that follows its reduction
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        mine[(warp * kN + n) * kWarp + lane] =
            make_float4(acc[n][0], acc[n][1], acc[n][2], acc[n][3]);
      }
      __syncthreads();
      // One warp a column tile adds the slices, each time another; the rest go on.
      const int n = (warp - turn * kN) & (kSlices - 1);
      if (n >= kN) continue;
      const auto slice_sum = [&](int s) { return mine[(s * kN + n) * kWarp + lane]; };
      float4 y = make_float4(0, 0, 0, 0);
#pragma unroll
      for (int s = 0; s < kSlices; s += kGroup) {
        float4 group = slice_sum(s);
#pragma unroll
        for (int i = 1; i < kGroup; ++i) group = group + slice_sum(s + i);
        y = s == 0 ? group : y + group;
      }
      if (part + 1 < parts) {
        first = landed4(y);
      } else {
        if (parts == 2) y = first + landed4(y);
        store_tile(p, tile, 8 * n + 2 * t, blockIdx.z, y);
      }
    }
  }
}

// --- many rows

constexpr int kStages = 3;
constexpr int kStageBlocks = 2;
constexpr int kTileBlockTiles = 8;  // weight tiles of a block, at most

// A block: blockDim.x / 32 / kColumnWarps weight tiles by kColumnWarps * kN tiles of eight columns.
template <int kN, int kColumnWarps>
struct TileShared {
  static constexpr int kColumnTiles = kN * kColumnWarps;
  static constexpr int kPlaneChunks = kColumnTiles * kStageBlocks * kWarp;
  static __host__ __device__ int stage_chunks(int tiles, int planes) {
    return tiles * kStageBlocks * kBlockChunks + planes * kPlaneChunks;
  }
  // Stages, the running totals, and the landed first sums where there is a second product.
  static size_t bytes(int tiles, int planes, bool second) {
    const size_t totals = static_cast<size_t>(tiles) * kColumnTiles * kWarp * 16;
    return static_cast<size_t>(kStages) * 16 * static_cast<size_t>(stage_chunks(tiles, planes)) +
           totals * (second ? 2 : 1);
  }
};

template <int kN, int kColumnWarps>
__global__ void __launch_bounds__(kTileBlockTiles* kColumnWarps* kWarp, kColumnWarps == 1 ? 2 : 1)
    tile_kernel(const __grid_constant__ Product p) {
  using Shared = TileShared<kN, kColumnWarps>;
  K3_DYNAMIC_SHARED(uint4, shared);
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int warp = thread / kWarp, lane = thread % kWarp;
  const int block_tiles = threads / (kWarp * kColumnWarps);
  const int my_tile = warp / kColumnWarps, my_columns = warp % kColumnWarps * kN;
  const int all_tiles = p.in.w.rows / kTileRows;
  const int first_tile = static_cast<int>(blockIdx.y) * block_tiles;
  const int first_row = static_cast<int>(blockIdx.x) * Shared::kColumnTiles * 8;
  const int parts = p.second.w.data != nullptr ? 2 : 1;
  const int max_planes = p.in.x_lo != nullptr || p.second.x_lo != nullptr ? 2 : 1;
  const int w_chunks = block_tiles * kStageBlocks * kBlockChunks;
  const int stage_chunks = Shared::stage_chunks(block_tiles, max_planes);
  float4* total = reinterpret_cast<float4*>(shared + kStages * stage_chunks) + thread;
  float4* first = total + kN * threads;  // used with a second product alone

  for (int part = 0; part < parts; ++part) {
    const ProductInput& in = part == 0 ? p.in : p.second;
    const int k = in.w.k, blocks = num_blocks(k);
    const int stages = (blocks + kStageBlocks - 1) / kStageBlocks;
    const int planes = in.x_lo != nullptr ? 2 : 1;
    const uint4* w = in.w.data + static_cast<int64_t>(blockIdx.z) * p.w_batch_stride;
    const auto stage_at = [&](int stage) { return shared + stage % kStages * stage_chunks; };

    const auto load_w = [&](int stage) {
      if (stage >= stages) return;
      uint4* to = stage_at(stage);
      for (int c = thread; c < w_chunks; c += threads) {
        constexpr int kTileChunks = kStageBlocks * kBlockChunks;
        const int in_tile = c % kTileChunks;
        const int tile = min(first_tile + c / kTileChunks, all_tiles - 1);
        if (stage * kStageBlocks + in_tile / kBlockChunks >= blocks) continue;
        copy_async16(
            to + c,
            w + (static_cast<int64_t>(tile) * blocks + stage * kStageBlocks) * kBlockChunks +
                in_tile);
      }
    };
    const auto load_x = [&](int stage) {
      if (stage >= stages) return;
      uint4* to = stage_at(stage) + w_chunks;
      for (int c = thread; c < planes * Shared::kPlaneChunks; c += threads) {
        const int plane = c / Shared::kPlaneChunks, in_plane = c % Shared::kPlaneChunks;
        const int column_tile = in_plane / (kStageBlocks * kWarp);
        const int block = stage * kStageBlocks + in_plane / kWarp % kStageBlocks;
        const int row = first_row + column_tile * 8 + c % kWarp / 4;
        const int at = block * kBlockK + c % 4 * 8;
        const bf16* from = (plane == 0 ? in.x : in.x_lo) +
                           static_cast<int64_t>(blockIdx.z) * p.x_batch_stride + row * in.ldx;
        if (row >= p.rows || at >= k) {
          to[c] = make_uint4(0, 0, 0, 0);
        } else if (at + 8 <= k) {
          copy_async16(to + c, from + at);
        } else {
          to[c] = x_tail(from, at, k);
        }
      }
    };

    if (part > 0) __syncthreads();  // the last stages of the first product have been read
    for (int s = 0; s < kStages - 1; ++s) load_w(s);
    if (part == 0) {
      wait_for_inputs();
      let_next_start();
    }
    for (int s = 0; s < kStages - 1; ++s) {
      load_x(s);
      copy_async_commit();
    }

    float acc[kN][4] = {}, group[kN][4];
    int slice = 0;
    // Closes the slices that end at or before block b: a slice joins its group, the fourth of a
    // group its group the total.
    const auto close_slices = [&](int b) {
      for (; slice < kSlices && slice_begin(slice + 1, blocks) <= b; ++slice) {
#pragma unroll
        for (int n = 0; n < kN; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            group[n][i] = slice % kGroup == 0 ? acc[n][i] : group[n][i] + acc[n][i];
            acc[n][i] = 0;
          }
        }
        if (slice % kGroup != kGroup - 1) continue;
#pragma unroll
        for (int n = 0; n < kN; ++n) {
          const float4 sum = make_float4(group[n][0], group[n][1], group[n][2], group[n][3]);
          total[n * threads] = slice < kGroup ? sum : total[n * threads] + sum;
        }
      }
    };
    for (int stage = 0; stage < stages; ++stage) {
      copy_async_wait<kStages - 2>();
      __syncthreads();  // the stage is there, and the one before it has been read
      load_w(stage + kStages - 1);
      load_x(stage + kStages - 1);
      copy_async_commit();
      const uint4* a = stage_at(stage) + my_tile * kStageBlocks * kBlockChunks + lane;
      const uint4* b = stage_at(stage) + w_chunks + my_columns * kStageBlocks * kWarp + lane;
#pragma unroll 1
      for (int j = 0; j < kStageBlocks; ++j) {
        if (stage * kStageBlocks + j >= blocks) break;
        close_slices(stage * kStageBlocks + j);
        const uint4 low = a[j * kBlockChunks], high = a[j * kBlockChunks + kWarp];
        for (int plane = 0; plane < planes; ++plane) {
          constexpr int kChunk = kN < 4 ? kN : 4;  // B fragments held at once
#pragma unroll
          for (int n = 0; n < kN; n += kChunk) {
            uint4 x[kChunk];
#pragma unroll
            for (int i = 0; i < kChunk; ++i) {
              x[i] = b[plane * Shared::kPlaneChunks + ((n + i) * kStageBlocks + j) * kWarp];
            }
            mma_block(acc + n, low, high, x);
          }
        }
      }
    }
    close_slices(blocks);

    const int tile = first_tile + my_tile;
#pragma unroll 1
    for (int n = 0; n < kN; ++n) {
      float4 y = total[n * threads];
      if (part + 1 < parts) {
        first[n * threads] = landed4(y);
      } else if (tile < all_tiles) {
        if (parts == 2) y = first[n * threads] + landed4(y);
        store_tile(p, tile, first_row + (my_columns + n) * 8 + lane % 4 * 2, blockIdx.z, y);
      }
    }
  }
}

// --- launches

int num_multiprocessors() {
  static const int count = [] {
    int device = 0, n = 0;
    if (cudaGetDevice(&device) != cudaSuccess ||
        cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) {
      return 1;  // the launch will report the error
    }
    return n;
  }();
  return count;
}

template <int kN>
Status launch_stream(const char* name, const Product& p, cudaStream_t stream) {
  K3_RETURN_IF_ERROR(allow_shared(name, stream_kernel<kN>, kStreamShared<kN>));
  const int blocks = std::min(p.in.w.rows / kTileRows, num_multiprocessors());
  return launch(name, stream_kernel<kN>,
                {dim3(static_cast<unsigned>(blocks), 1, static_cast<unsigned>(p.batch)),
                 dim3(kStreamThreads), kStreamShared<kN>},
                stream, p);
}

template <int kN, int kColumnWarps>
Status launch_tiles(const char* name, const Product& p, cudaStream_t stream) {
  using Shared = TileShared<kN, kColumnWarps>;
  K3_RETURN_IF_ERROR(allow_shared(name, tile_kernel<kN, kColumnWarps>, kMaxSharedBytes));
  const bool second = p.second.w.data != nullptr;
  const int planes = p.in.x_lo != nullptr || p.second.x_lo != nullptr ? 2 : 1;
  const int all_tiles = p.in.w.rows / kTileRows;
  const int columns = (p.rows + Shared::kColumnTiles * 8 - 1) / (Shared::kColumnTiles * 8);
  // Large blocks re-read x least; smaller ones where the grid would not cover the card, or where
  // two planes and a second product together do not fit.
  int tiles = kTileBlockTiles;
  const auto blocks = [&] { return (all_tiles + tiles - 1) / tiles; };
  while (tiles > 1 && (static_cast<int64_t>(blocks()) * columns * p.batch < num_multiprocessors() ||
                       Shared::bytes(tiles, planes, second) > kMaxSharedBytes)) {
    tiles /= 2;
  }
  return launch(name, tile_kernel<kN, kColumnWarps>,
                {dim3(static_cast<unsigned>(columns), static_cast<unsigned>(blocks()),
                      static_cast<unsigned>(p.batch)),
                 dim3(static_cast<unsigned>(tiles * kColumnWarps * kWarp)),
                 Shared::bytes(tiles, planes, second)},
                stream, p);
}

Status check_input(const char* name, const ProductInput& in, int32_t stack_rows) {
  const auto aligned = [](const bf16* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  if (in.w.data == nullptr || in.w.rows <= 0 || in.w.rows % kTileRows != 0 || in.w.k <= 0 ||
      in.w.rows != stack_rows) {
    return invalid_argument(name, ": weights of ", in.w.rows, " x ", in.w.k,
                            ", expected a multiple of 16 rows, ", stack_rows);
  }
  if (in.x == nullptr || in.ldx % 8 != 0 || in.ldx < in.w.k || !aligned(in.x) ||
      !aligned(in.x_lo)) {
    return invalid_argument(name, ": rows of x must be 16-byte aligned and at least ", in.w.k,
                            " elements apart, found ", in.ldx);
  }
  return {};
}

// --- packing

__global__ void __launch_bounds__(256)
    pack_kernel(uint4* packed, int64_t first_tile, PackSource source, Interleave interleave,
                int64_t tiles, bool vector_loads) {
  wait_for_inputs();  // no let_next_start(): products read weights before they wait
  const int64_t blocks = (source.k + kBlockK - 1) / kBlockK;
  const int halves = interleave == Interleave::kNone ? 2 : 1;
  const int64_t count = tiles * blocks * halves * kWarp;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += stride) {
    const int lane = static_cast<int>(i % kWarp);
    const int64_t rest = i / kWarp;
    const int half = interleave == Interleave::kNone ? static_cast<int>(rest % 2)
                     : interleave == Interleave::kUp ? 1
                                                     : 0;
    const int64_t tile_block = rest / halves;
    const int64_t tile = tile_block / blocks, block = tile_block % blocks;
    const int64_t row = interleave == Interleave::kNone ? tile * kTileRows + 8 * half + lane / 4
                                                        : tile * 8 + lane / 4;
    const int64_t k = block * kBlockK + 8 * (lane % 4);
    uint4 chunk = make_uint4(0, 0, 0, 0);
    if (row < source.rows && k < source.k) {
      const bf16* from = source.data + row * source.row_stride + k * source.k_stride;
      if (vector_loads && k + 8 <= source.k) {
        chunk = load_stream(reinterpret_cast<const uint4*>(from));
      } else {
        uint32_t word[4] = {};
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          const uint32_t value = k + e < source.k ? from[e * source.k_stride] : 0;
          word[e / 2] |= value << (16 * (e % 2));
        }
        chunk = make_uint4(word[0], word[1], word[2], word[3]);
      }
    }
    packed[((first_tile + tile) * blocks + block) * kBlockChunks + half * kWarp + lane] = chunk;
  }
}

}  // namespace

Status pack_rows(uint4* packed, int64_t first_row, const PackSource& source, Interleave interleave,
                 cudaStream_t stream) {
  if (first_row % kTileRows != 0 || source.rows <= 0 || source.k <= 0) {
    return invalid_argument("pack_rows: ", source.rows, " x ", source.k, " at row ", first_row,
                            ", expected something at a multiple of 16");
  }
  const bool vector_loads = source.k_stride == 1 && source.row_stride % 8 == 0 &&
                            reinterpret_cast<uintptr_t>(source.data) % 16 == 0;
  const int64_t tile_rows = interleave == Interleave::kNone ? kTileRows : 8;
  const int64_t tiles = (source.rows + tile_rows - 1) / tile_rows;
  const int64_t threads = tiles * tile_rows / 8 * num_blocks(static_cast<int>(source.k)) * kWarp;
  const int64_t blocks = std::clamp<int64_t>((threads + 255) / 256, 1, 16384);
  return launch("pack_rows", pack_kernel, {dim3(static_cast<unsigned>(blocks)), dim3(256)}, stream,
                packed, first_row / kTileRows, source, interleave, tiles, vector_loads);
}

Status run_product(const char* name, const Product& p, cudaStream_t stream) {
  K3_RETURN_IF_ERROR(check_input(name, p.in, p.in.w.rows));
  if (p.second.w.data != nullptr) {
    K3_RETURN_IF_ERROR(check_input(name, p.second, p.in.w.rows));
    if (p.num_outputs != 1 || p.out[0].epilogue != Epilogue::kLand) {
      return invalid_argument(name, ": a second product needs one landed output");
    }
  }
  if (p.num_outputs < 1 || p.num_outputs > kMaxProductOutputs || p.rows < 1 || p.batch < 1 ||
      p.x_batch_stride % 8 != 0) {
    return invalid_argument(name, ": ", p.num_outputs, " outputs, ", p.rows, " rows, batch ",
                            p.batch);
  }
  constexpr int kShortK = 1024;  // below it a slice is one block or two
  if (p.rows <= 8 * kStreamMaxTiles && p.in.w.k > kShortK) {
    return p.rows <= 8 ? launch_stream<1>(name, p, stream) : launch_stream<2>(name, p, stream);
  }
  if (p.rows <= 8) return launch_tiles<1, 1>(name, p, stream);
  if (p.rows <= 16) return launch_tiles<2, 1>(name, p, stream);
  if (p.rows <= 32) return launch_tiles<4, 1>(name, p, stream);
  if (p.rows <= 64) return launch_tiles<8, 1>(name, p, stream);
  return launch_tiles<8, 2>(name, p, stream);
}

}  // namespace k3::cuda
