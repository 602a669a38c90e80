// The chain of launches of experts.h. The products stream packed MXFP4 codes as products.cu streams
// bf16: each warp owns a K slice and a private ring of shared memory that runs ahead over its
// tiles.
//
// A packed matrix is [tile of 16 rows][block of 64 K][544 bytes]: 16 bytes of codes a lane, then 4
// bytes of scales for each g = lane / 4. Word w of a lane is mma step w of the block, and its
// halves are K neighbours k and k + 1, k = 32 (w / 2) + 8 t + 4 (w % 2): a half holds the codes of
//   {row g, k} at bits {15, 8, 7, 6},  {row g + 8, k} at {12, 5, 4, 3},
//   {row g, k + 2} at {9, 2, 1, 0},    {row g + 8, k + 2} at {14, 13, 11, 10},
// so that a shift and a mask make a bf16 worth code * 2^-126. The scale bytes {row g, row g + 8} of
// the first 32 K, then of the second, are the exponent field of the bf16 2^(scale + 126), in the
// checkpoint's bias: scale + 126.
#include "cuda/kernels/experts.h"

#include <algorithm>

#include "cuda/device.h"
#include "cuda/launch.h"

namespace k3::cuda {
namespace {

constexpr int kTile = 16;
constexpr int kCodeBlock = 64;  // K
constexpr int kCodeChunks = kWarp;
constexpr int kBlockChunks = kCodeChunks + 2;  // of 16 bytes: 544
constexpr int kSlices = 4;
constexpr int kTilesAtOnce = 4;  // of a block of threads
constexpr int kThreads = kTilesAtOnce * kSlices * kWarp;
constexpr int kMaxExperts = 1 << 14;
constexpr int kMaxScale = 128;

__host__ __device__ int num_code_blocks(int k) { return (k + kCodeBlock - 1) / kCodeBlock; }
__host__ __device__ int64_t matrix_chunks(int64_t rows, int64_t k) {
  return (rows + kTile - 1) / kTile * num_code_blocks(static_cast<int>(k)) * kBlockChunks;
}

// --- routes

// Block 0 lists the experts with work; of the others each warp lists one expert's assignments.
__global__ void __launch_bounds__(256) routes_kernel(const __grid_constant__ ExpertsCall c) {
  __shared__ unsigned char chosen[kMaxExperts];
  wait_for_inputs();
  let_next_start();
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp;
  const int experts = c.bank.num_experts;
  const int count = min(*c.live_rows, c.rows) * c.top_k;
  if (blockIdx.x == 0) {
    for (int e = thread; e < experts; e += static_cast<int>(blockDim.x)) chosen[e] = 0;
    __syncthreads();
    for (int a = thread; a < count; a += static_cast<int>(blockDim.x)) {
      const int e = c.topk_ids[a] - c.first_expert;
      if (e >= 0 && e < experts) chosen[e] = 1;  // all who race write the same
    }
    __syncthreads();
    if (thread >= kWarp) return;
    int active = 0;
    for (int first = 0; first < experts; first += kWarp) {
      const bool has_work = first + lane < experts && chosen[first + lane] != 0;
      const unsigned lanes = __ballot_sync(kAllLanes, has_work);
      if (has_work) c.active[active + __popc(lanes & ((1u << lane) - 1))] = first + lane;
      active += __popc(lanes);
    }
    if (lane == 0) c.counts[experts] = active;
    return;
  }
  const int e =
      (static_cast<int>(blockIdx.x) - 1) * static_cast<int>(blockDim.x) / kWarp + thread / kWarp;
  if (e >= experts) return;
  int32_t* list = c.lists + static_cast<int64_t>(e) * c.max_rows;
  int n = 0;
  for (int first = 0; first < count; first += kWarp) {
    const int a = first + lane;
    const bool mine = a < count && c.topk_ids[a] - c.first_expert == e;
    const unsigned lanes = __ballot_sync(kAllLanes, mine);
    if (mine) list[n + __popc(lanes & ((1u << lane) - 1))] = a;
    n += __popc(lanes);
  }
  if (lane == 0) c.counts[e] = n;
}

// --- products

struct ExpertProduct {
  const uint4* w = nullptr;  // expert-major
  int64_t expert_chunks = 0;
  int32_t tiles = 0, k = 0;
  const bf16* x = nullptr;  // row of assignment a: a / x_div
  int32_t x_div = 1;
  bf16* out = nullptr;  // row a
  int32_t ld = 0;
  const int32_t* lists = nullptr;
  const int32_t* counts = nullptr;
  const int32_t* active = nullptr;
  int32_t num_experts = 0, max_rows = 0;
  float situ_beta = 0, situ_linear_beta = 0;
};

// Blocks of threads on an SM, and 64-K blocks of a ring that fit then beside the partial sums.
template <int kN>
constexpr int kResident = kN == 1 ? 2 : 1;
template <int kN>
constexpr int kRing = kN == 1 ? 11 : 16;
template <int kN>
constexpr size_t kShared = 16 * kTilesAtOnce* kSlices*(kRing<kN>* kBlockChunks + 2 * kN * kWarp);

// One mma step's A fragment from a word of codes; scales are pairs for rows g and g + 8.
__device__ __forceinline__ void decode(uint32_t word, uint32_t low, uint32_t high,
                                       uint32_t (&a)[4]) {
  constexpr uint32_t kValue = 0x81c081c0u;
  a[0] = mul_pair(word & kValue, low);
  a[1] = mul_pair(word << 3 & kValue, high);
  a[2] = mul_pair(word << 6 & kValue, low);
  a[3] = mul_pair((word << 1 & 0x80008000u) | (word >> 5 & 0x01000100u) | (word >> 4 & 0x00c000c0u),
                  high);
}
// Byte i of the scales as a pair of bf16.
__device__ __forceinline__ uint32_t scale_pair(uint32_t scales, int i) {
  return (scales >> (8 * i) & 0xffu) * 0x00800080u;
}

// What a warp streams: its slice of its tile in each task of the block, once a pass of tokens. A
// task is an active expert and kTilesAtOnce tiles.
struct Walk {
  const uint4* at = nullptr;  // this lane's chunk of the next block
  int left = 0;               // blocks of the slice
  int task = 0;
  int pass = 0, passes = 0;
};

template <int kN, bool kGateUp>
__global__ void __launch_bounds__(kThreads, kResident<kN>)
    expert_kernel(const __grid_constant__ ExpertProduct p) {
  K3_DYNAMIC_SHARED(uint4, shared);
  wait_for_inputs();  // which experts there are comes from the routes
  let_next_start();
  const int warp = static_cast<int>(threadIdx.x) / kWarp,
            lane = static_cast<int>(threadIdx.x) % kWarp;
  const int slice = warp % kSlices, my_tile = warp / kSlices;
  const int g = lane / 4, t = lane % 4;
  const int blocks = num_code_blocks(p.k);
  const int begin = slice * blocks / kSlices, end = (slice + 1) * blocks / kSlices;
  const int groups = (p.tiles + kTilesAtOnce - 1) / kTilesAtOnce;
  const int tasks = p.counts[p.num_experts] * groups;
  uint4* ring = shared + warp * kRing<kN> * kBlockChunks;
  float4* partial =
      reinterpret_cast<float4*>(shared + kTilesAtOnce * kSlices * kRing<kN> * kBlockChunks);

  Walk walk;
  const auto open_task = [&] {
    const int expert = p.active[walk.task / groups];
    walk.passes = (p.counts[expert] + 8 * kN - 1) / (8 * kN);
    walk.pass = 0;
  };
  const auto open_slice = [&] {
    const int tile = walk.task % groups * kTilesAtOnce + my_tile;
    walk.left = tile < p.tiles ? end - begin : 0;
    walk.at = p.w + p.active[walk.task / groups] * p.expert_chunks +
              (static_cast<int64_t>(tile) * blocks + begin) * kBlockChunks + lane;
  };
  const auto push = [&](int slot) {
    while (walk.left == 0 && walk.task < tasks) {
      if (++walk.pass == walk.passes) {
        walk.task += static_cast<int>(gridDim.x);
        if (walk.task >= tasks) break;
        open_task();
      }
      open_slice();
    }
    if (walk.left > 0) {
      uint4* to = ring + slot * kBlockChunks + lane;
      copy_async16(to, walk.at);
      if (lane < 2) copy_async16(to + kCodeChunks, walk.at + kCodeChunks);
      walk.at += kBlockChunks;
      --walk.left;
    }
    copy_async_commit();
  };
  walk.task = static_cast<int>(blockIdx.x);
  if (walk.task < tasks) {
    open_task();
    open_slice();
  }
  for (int slot = 0; slot < kRing<kN> - 1; ++slot) push(slot);

  int slot = 0, turn = 0;
  for (int task = static_cast<int>(blockIdx.x); task < tasks; task += static_cast<int>(gridDim.x)) {
    const int expert = p.active[task / groups];
    const int tile = task % groups * kTilesAtOnce + my_tile;
    const int count = p.counts[expert];
    const int32_t* list = p.lists + static_cast<int64_t>(expert) * p.max_rows;
    for (int first = 0; first < count; first += 8 * kN, ++turn) {
      const bf16* x_row[kN];
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const int j = first + 8 * n + g;
        x_row[n] = j < count ? p.x + static_cast<int64_t>(list[j] / p.x_div) * p.k : nullptr;
      }
      float acc[kN][4] = {};
      for (int b = tile < p.tiles ? begin : end; b < end; ++b) {
        uint4 x[2][kN];
#pragma unroll
        for (int u = 0; u < 2; ++u) {
          const int at = b * kCodeBlock + 32 * u + 8 * t;
#pragma unroll
          for (int n = 0; n < kN; ++n) {
            x[u][n] = x_row[n] != nullptr && at < p.k
                          ? *reinterpret_cast<const uint4*>(x_row[n] + at)
                          : make_uint4(0, 0, 0, 0);
          }
        }
        copy_async_wait<kRing<kN> - 2>();
        __syncwarp();  // the scales are two lanes' copies; and all have read the slot before
        const uint4* from = ring + slot * kBlockChunks;
        const uint4 codes = from[lane];
        const uint32_t scales = reinterpret_cast<const uint32_t*>(from + kCodeChunks)[g];
        push(slot == 0 ? kRing<kN> - 1 : slot - 1);
        slot = slot + 1 == kRing<kN> ? 0 : slot + 1;
        const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const int u = w / 2;
          uint32_t a[4];
          decode(words[w], scale_pair(scales, 2 * u), scale_pair(scales, 2 * u + 1), a);
#pragma unroll
          for (int n = 0; n < kN; ++n) {
            if (n > 0 && first + 8 * n >= count) break;
            if (w % 2 == 0) {
              mma_16x8x16(acc[n], a, x[u][n].x, x[u][n].y);
            } else {
              mma_16x8x16(acc[n], a, x[u][n].z, x[u][n].w);
            }
          }
        }
      }

      // A buffer is written again only after the barrier that follows its reduction.
      float4* sums = partial + ((turn & 1) * kTilesAtOnce + my_tile) * kSlices * kN * kWarp + lane;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        sums[(slice * kN + n) * kWarp] = make_float4(acc[n][0], acc[n][1], acc[n][2], acc[n][3]);
      }
      __syncthreads();
      // A tile's warps take turns to add its slices, one column tile each.
      const int n = (slice - turn * kN) & (kSlices - 1);
      if (n >= kN || tile >= p.tiles) continue;
      float y[4] = {};
#pragma unroll
      for (int s = 0; s < kSlices; ++s) {
        const float4 v = sums[(s * kN + n) * kWarp];
        const float part[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) y[i] = s == 0 ? part[i] : y[i] + part[i];
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {  // columns 2 t and 2 t + 1
        const int j = first + 8 * n + 2 * t + i;
        if (j >= count) continue;
        bf16* out = p.out + static_cast<int64_t>(list[j]) * p.ld;
        if (kGateUp) {
          out[tile * 8 + g] =
              land(situ_f32(landed(y[i]), landed(y[2 + i]), p.situ_beta, p.situ_linear_beta));
        } else {
          out[tile * kTile + g] = land(y[i]);
          out[tile * kTile + 8 + g] = land(y[2 + i]);
        }
      }
    }
  }
}

// --- combine and norm, a block a row

__global__ void __launch_bounds__(512) combine_kernel(const __grid_constant__ ExpertsCall c) {
  wait_for_inputs();
  let_next_start();
  __shared__ float warp_sums[512 / kWarp];
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int64_t row = blockIdx.x;
  const int latent = c.bank.latent, chunks = latent / 8;
  uint4* out = reinterpret_cast<uint4*>(c.out + row * latent);
  if (row >= *c.live_rows) {
    for (int i = thread; i < chunks; i += threads) out[i] = make_uint4(0, 0, 0, 0);
    return;
  }
  // The landed sum waits in `out` for the norm; each thread reads back what it wrote.
  float squares = 0;
  for (int i = thread; i < chunks; i += threads) {
    float sum[8] = {};
#pragma unroll 8
    for (int s = 0; s < c.top_k; ++s) {
      const int e = c.topk_ids[row * c.top_k + s] - c.first_expert;
      if (e < 0 || e >= c.bank.num_experts) continue;  // another rank's
      const float weight = c.topk_weights[row * c.top_k + s];
      const uint4 v = reinterpret_cast<const uint4*>(c.y + (row * c.top_k + s) * latent)[i];
      const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        sum[2 * j] = fmaf(weight, low_to_float(words[j]), sum[2 * j]);
        sum[2 * j + 1] = fmaf(weight, high_to_float(words[j]), sum[2 * j + 1]);
      }
    }
    uint32_t words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      words[j] = land_pair(sum[2 * j], sum[2 * j + 1]);
      squares = fmaf(low_to_float(words[j]), low_to_float(words[j]), squares);
      squares = fmaf(high_to_float(words[j]), high_to_float(words[j]), squares);
    }
    out[i] = make_uint4(words[0], words[1], words[2], words[3]);
  }
  squares = warp_sum(squares);
  if (thread % kWarp == 0) warp_sums[thread / kWarp] = squares;
  __syncthreads();
  float total = 0;
  for (int w = 0; w < threads / kWarp; ++w) total += warp_sums[w];
  const float r = 1.f / sqrtf(total / static_cast<float>(latent) + c.rms_eps);
  for (int i = thread; i < chunks; i += threads) {
    const uint4 v = out[i];
    uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float* gain = c.norm_gain + 8 * i + 2 * j;
      words[j] = land_pair(landed(low_to_float(words[j]) * r) * gain[0],
                           landed(high_to_float(words[j]) * r) * gain[1]);
    }
    out[i] = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

// --- packing

struct PackExpert {
  RawExpertMatrix half[2];         // rows g and rows g + 8 of a tile
  int64_t half_index[2] = {0, 0};  // what `bad_scale` counts from
  bool gate_up = false;
  int32_t tiles = 0, k = 0;
};

__device__ uint32_t code_half(uint32_t even, uint32_t odd, int shift) {
  const auto place = [](uint32_t code) { return code >> 3 << 15 | (code & 7) << 6; };
  return (place(even) | place(odd) << 16) >> shift;
}

__global__ void __launch_bounds__(256)
    pack_expert_kernel(const __grid_constant__ PackExpert p, uint4* out, int64_t* bad_scale) {
  wait_for_inputs();
  const int blocks = num_code_blocks(p.k), groups = p.k / 32;
  const int64_t count = static_cast<int64_t>(p.tiles) * blocks * kWarp;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += stride) {
    const int lane = static_cast<int>(i % kWarp), g = lane / 4, t = lane % 4;
    const int64_t tile = i / kWarp / blocks;
    const int block = static_cast<int>(i / kWarp % blocks);
    uint32_t words[4] = {}, scales = 0;
    for (int half = 0; half < 2; ++half) {
      const int64_t row = p.gate_up ? tile * 8 + g : tile * kTile + 8 * half + g;
      for (int u = 0; u < 2; ++u) {
        const int group = 2 * block + u;
        uint32_t scale = 127;
        if (group < groups) {
          const int64_t at = row * groups + group;
          scale = static_cast<uint32_t>(p.half[half].scales[at]);
          if (scale > kMaxScale) {
            if (t == 0) {
              atomicMax(reinterpret_cast<long long*>(bad_scale),
                        static_cast<long long>((p.half_index[half] + at) * 256 + scale));
            }
            scale = kMaxScale;
          }
          // Codes of k = 32 group + 8 t + {0, 1}, {2, 3}, {4, 5}, {6, 7}, the even one low.
          const std::byte* codes = p.half[half].codes + row * (p.k / 2) + 16 * group + 4 * t;
          for (int pair = 0; pair < 4; ++pair) {
            const uint32_t byte = static_cast<uint32_t>(codes[pair]);
            const uint32_t even = byte & 15, odd = byte >> 4;
            uint32_t& word = words[2 * u + pair / 2];
            if (half == 0) {
              word |= code_half(even, odd, pair % 2 == 0 ? 0 : 6);
            } else if (pair % 2 == 0) {
              word |= code_half(even, odd, 3);
            } else {
              const auto place = [](uint32_t code) {
                return code >> 3 << 14 | (code >> 2 & 1) << 13 | (code & 3) << 10;
              };
              word |= place(even) | place(odd) << 16;
            }
          }
        }
        scales |= (scale + 126) << (8 * (2 * u + half));
      }
    }
    uint4* to = out + (tile * blocks + block) * kBlockChunks;
    to[lane] = make_uint4(words[0], words[1], words[2], words[3]);
    if (t == 0) reinterpret_cast<uint32_t*>(to + kCodeChunks)[g] = scales;
  }
}

Status pack_expert(const PackExpert& p, std::byte* out, int64_t* bad_scale, cudaStream_t stream) {
  if (p.k <= 0 || p.k % 32 != 0 || p.tiles <= 0 || reinterpret_cast<uintptr_t>(out) % 16 != 0) {
    return invalid_argument("pack expert: k ", p.k, ", tiles ", p.tiles,
                            ", expected multiples of 32 and of 16 rows, out 16-byte aligned");
  }
  const int64_t threads = static_cast<int64_t>(p.tiles) * num_code_blocks(p.k) * kWarp;
  return launch("pack expert", pack_expert_kernel,
                {dim3(static_cast<unsigned>((threads + 255) / 256)), dim3(256)}, stream, p,
                reinterpret_cast<uint4*>(out), bad_scale);
}

// --- launches

template <int kN, bool kGateUp>
Status run_expert_product(const char* name, const ExpertProduct& p, int max_active,
                          cudaStream_t stream) {
  K3_RETURN_IF_ERROR(allow_shared(name, expert_kernel<kN, kGateUp>, kShared<kN>));
  int device = 0, multiprocessors = 0;
  K3_RETURN_IF_ERROR(cuda_check("cudaGetDevice", cudaGetDevice(&device)));
  K3_RETURN_IF_ERROR(
      cuda_check("multiprocessors",
                 cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device)));
  const int64_t tasks =
      static_cast<int64_t>(max_active) * ((p.tiles + kTilesAtOnce - 1) / kTilesAtOnce);
  const int64_t blocks = std::min<int64_t>(tasks, kResident<kN> * multiprocessors);
  return launch(name, expert_kernel<kN, kGateUp>,
                {dim3(static_cast<unsigned>(blocks)), dim3(kThreads), kShared<kN>}, stream, p);
}

template <bool kGateUp>
Status run_expert_product(const char* name, const ExpertProduct& p, int rows, int max_active,
                          cudaStream_t stream) {
  if (rows <= 8) return run_expert_product<1, kGateUp>(name, p, max_active, stream);
  if (rows <= 16) return run_expert_product<2, kGateUp>(name, p, max_active, stream);
  return run_expert_product<4, kGateUp>(name, p, max_active, stream);
}

}  // namespace

int64_t expert_w13_bytes(int64_t latent, int64_t inter) {
  return 16 * matrix_chunks(2 * inter, latent);
}
int64_t expert_w2_bytes(int64_t latent, int64_t inter) { return 16 * matrix_chunks(latent, inter); }

Status pack_expert_w13(std::byte* out, const RawExpertMatrix& w1, const RawExpertMatrix& w3,
                       int64_t latent, int64_t inter, int64_t* bad_scale, cudaStream_t stream) {
  PackExpert p;
  p.half[0] = w1;
  p.half[1] = w3;
  p.half_index[1] = inter * (latent / 32);  // w3's scales count on from w1's
  p.gate_up = true;
  p.tiles = static_cast<int32_t>(inter / 8);
  p.k = static_cast<int32_t>(latent);
  return pack_expert(p, out, bad_scale, stream);
}

Status pack_expert_w2(std::byte* out, const RawExpertMatrix& w2, int64_t latent, int64_t inter,
                      int64_t* bad_scale, cudaStream_t stream) {
  PackExpert p;
  p.half[0] = p.half[1] = w2;
  p.tiles = static_cast<int32_t>(latent / kTile);
  p.k = static_cast<int32_t>(inter);
  return pack_expert(p, out, bad_scale, stream);
}

Status run_experts(const ExpertsCall& call, cudaStream_t stream) {
  const ExpertBank& bank = call.bank;
  if (bank.latent <= 0 || bank.latent % 32 != 0 || bank.inter <= 0 || bank.inter % 32 != 0 ||
      bank.num_experts < 1 || bank.num_experts > kMaxExperts || call.rows < 1 ||
      call.rows > call.max_rows || call.top_k < 1) {
    return invalid_argument("experts: ", bank.num_experts, " of ", bank.latent, " x ", bank.inter,
                            ", ", call.rows, " rows of at most ", call.max_rows, ", top ",
                            call.top_k);
  }
  const int route_blocks = 1 + (bank.num_experts + 7) / 8;
  K3_RETURN_IF_ERROR(launch("expert routes", routes_kernel,
                            {dim3(static_cast<unsigned>(route_blocks)), dim3(256)}, stream, call));

  const int max_active = static_cast<int>(
      std::min<int64_t>(bank.num_experts, static_cast<int64_t>(call.rows) * call.top_k));
  ExpertProduct p;
  p.lists = call.lists;
  p.counts = call.counts;
  p.active = call.active;
  p.num_experts = bank.num_experts;
  p.max_rows = call.max_rows;
  p.situ_beta = call.situ_beta;
  p.situ_linear_beta = call.situ_linear_beta;

  p.w = reinterpret_cast<const uint4*>(bank.w13);
  p.expert_chunks = matrix_chunks(2 * bank.inter, bank.latent);
  p.tiles = bank.inter / 8;
  p.k = bank.latent;
  p.x = call.z;
  p.x_div = call.top_k;
  p.out = call.h;
  p.ld = bank.inter;
  K3_RETURN_IF_ERROR(run_expert_product<true>("expert w13", p, call.rows, max_active, stream));

  p.w = reinterpret_cast<const uint4*>(bank.w2);
  p.expert_chunks = matrix_chunks(bank.latent, bank.inter);
  p.tiles = bank.latent / kTile;
  p.k = bank.inter;
  p.x = call.h;
  p.x_div = 1;
  p.out = call.y;
  p.ld = bank.latent;
  K3_RETURN_IF_ERROR(run_expert_product<false>("expert w2", p, call.rows, max_active, stream));

  return launch("expert combine", combine_kernel,
                {dim3(static_cast<unsigned>(call.rows)), dim3(512)}, stream, call);
}

}  // namespace k3::cuda
