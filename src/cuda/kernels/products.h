// Dense products y = x W^T over packed bf16 weights, exact for any batch: the weights are the A
// operand of mma.sync m16n8k16, rows of x its columns, so a row's bits never depend on the others.
//
// The order of the sum is the contract: K in blocks of 32 (padded with zeros), blocks cut into 16
// contiguous slices ([i B / 16, (i + 1) B / 16) of B blocks), each slice one chain of mma steps in
// ascending K; slices are added in order in four groups of four, then the groups in order. Tiles,
// warps and grids are free.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/status.h"
#include "cuda/device.h"

namespace k3::cuda {

inline constexpr int kTileRows = 16;  // weight rows of a packed tile
inline constexpr int kBlockK = 32;    // K of a packed block
inline constexpr int kBlockBytes = kTileRows * kBlockK * 2;

// [tile][K block][half 0..1][lane][16 bytes]. Lane l (g = l / 4, t = l % 4) holds in half h
// elements [8 t, 8 t + 8) of the block of row g + 8 h of the tile: mma step s of the block takes
// its k pairs {8 t + 4 s, + 1} and {8 t + 4 s + 2, + 3}, so the matching columns of x are 16
// contiguous bytes.
struct PackedMatrix {
  const uint4* data = nullptr;
  int32_t rows = 0;  // multiple of 16: a stack of matrices, each padded with zero rows
  int32_t k = 0;     // as the checkpoint has it; blocks pad it to 32 with zeros
};
constexpr int64_t padded_rows(int64_t rows) { return (rows + 15) / 16 * 16; }
constexpr int64_t packed_bytes(int64_t rows, int64_t k) {
  return padded_rows(rows) / kTileRows * ((k + kBlockK - 1) / kBlockK) * kBlockBytes;
}

// How rows of a source matrix fall into the rows of a stack.
enum class Interleave {
  kNone,  // row r at first_row + r
  kGate,  // row r at first_row + 16 (r / 8) + r % 8
  kUp,    // eight further
};
// A bf16 matrix in device memory: element (r, k) at data[r * row_stride + k * k_stride], counted in
// elements; 2-byte aligned.
struct PackSource {
  const bf16* data = nullptr;
  int64_t rows = 0, k = 0;
  int64_t row_stride = 0, k_stride = 1;
};
// Writes all tiles that `source` touches, padding rows and padding K as zeros. kGate and kUp write
// their own halves of each tile alone. first_row is a multiple of 16.
Status pack_rows(uint4* packed, int64_t first_row, const PackSource& source, Interleave interleave,
                 cudaStream_t stream);

enum class Epilogue {
  kLand,     // out: bf16
  kF32,      // out: float
  kLandF32,  // out: float, land(y) widened (logits)
  kSitu,   // stack rows interleaved gate and up: each lands, situ of them lands; out: bf16, half as
           // many columns as stack rows
  kSplit,  // out and out_lo: bf16, land(y) and land(y - land(y)): a float32 in two planes
  kGate,   // out: land(land(y) * land(sigmoid(gate))), bf16
};

// Stack rows [first_row, first_row + rows) of W give columns [0, rows) of `out` (kSitu: rows / 2).
struct ProductOutput {
  int32_t first_row = 0;  // multiple of 16
  int32_t rows = 0;       // without padding; kSitu: gate and up rows together, a multiple of 16
                          // after padding
  Epilogue epilogue = Epilogue::kLand;
  void* out = nullptr;
  bf16* out_lo = nullptr;
  const bf16* gate = nullptr;  // the same shape, strides and batch offsets as out
  int64_t ld = 0;              // elements between rows of out
  int64_t batch_stride = 0;    // elements of out between batch items
};
struct ProductInput {
  PackedMatrix w;
  const bf16* x = nullptr;  // [rows][ldx], 16-byte aligned rows (ldx a multiple of 8)
  const bf16* x_lo =
      nullptr;  // null, or a second plane that is added to x (each block: hi, then lo)
  int64_t ldx = 0;
};
inline constexpr int kMaxProductOutputs = 8;

struct Product {
  ProductInput in;
  // Where w.data is set: out = land(land(in) + land(second)). One kLand output; same stack rows.
  ProductInput second;
  ProductOutput out[kMaxProductOutputs];
  int32_t num_outputs = 0;
  int32_t rows = 0;  // rows of x: the bucket. Padding rows are computed like any other.
  // Independent products of one shape in one launch (the heads of MLA).
  int32_t batch = 1;
  int64_t w_batch_stride = 0;  // uint4 elements
  int64_t x_batch_stride = 0;  // elements
  float situ_beta = 0, situ_linear_beta = 0;
};

Status run_product(const char* name, const Product& product, cudaStream_t stream);

}  // namespace k3::cuda
