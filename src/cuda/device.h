// What kernels use beyond plain CUDA C++: the few PTX instructions, bf16 as bits, and elementary
// functions with the CPU's formulas. Kernels include this and nothing else of CUDA, so that the
// tests can compile the same sources for a host that emulates the card (tests/cuda/emulator).
//
// Everything is compiled with -fmad=false: a multiply-add is fused where the source says fmaf and
// nowhere else, as on the CPU (docs/numerics.md).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#if defined(K3_CUDA_EMULATED)
#include "emulated_ptx.h"
#endif

namespace k3::cuda {

using bf16 = uint16_t;  // the high half of a float32

inline constexpr int kWarp = 32;
inline constexpr unsigned kAllLanes = 0xffffffffu;

// What follows is for kernels alone; host sources see the names above through their contracts.
#if defined(__CUDACC__) || defined(K3_CUDA_EMULATED)

// Dynamic shared memory of a kernel, aligned for 16-byte accesses.
#if defined(K3_CUDA_EMULATED)
#define K3_DYNAMIC_SHARED(type, name) \
  type* name = reinterpret_cast<type*>(::k3::emulator::dynamic_shared())
#else
#define K3_DYNAMIC_SHARED(type, name)                          \
  extern __shared__ __align__(1024) unsigned char k3_shared[]; \
  type* name = reinterpret_cast<type*>(k3_shared)
#endif

// --- bf16

__device__ __forceinline__ float bf16_to_float(bf16 h) {
  return __uint_as_float(static_cast<uint32_t>(h) << 16);
}
__device__ __forceinline__ float low_to_float(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_to_float(uint32_t pair) {
  return __uint_as_float(pair & 0xffff0000u);
}
// Two values rounded to nearest even; `low` lands in the lower half.
__device__ __forceinline__ uint32_t land_pair(float low, float high) {
#if defined(K3_CUDA_EMULATED)
  return emulator::land_pair(low, high);
#else
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
#endif
}
__device__ __forceinline__ bf16 land(float x) { return static_cast<bf16>(land_pair(x, 0.f)); }
// The value after a landing.
__device__ __forceinline__ float landed(float x) { return low_to_float(land_pair(x, 0.f)); }

// Product of two bf16 pairs, each rounded to bf16.
__device__ __forceinline__ uint32_t mul_pair(uint32_t a, uint32_t b) {
#if defined(K3_CUDA_EMULATED)
  return emulator::mul_pair(a, b);
#else
  uint32_t y;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
#endif
}

// --- memory

// A read-once stream (weights): not kept in L1.
__device__ __forceinline__ uint4 load_stream(const uint4* p) {
#if defined(K3_CUDA_EMULATED)
  return *p;
#else
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
#endif
}

// 16 bytes, global to shared, asynchronously; commit closes a group, wait<N> leaves at most the N
// youngest groups in flight (this thread's copies; __syncthreads() makes them everyone's).
__device__ __forceinline__ void copy_async16(void* shared, const void* global) {
#if defined(K3_CUDA_EMULATED)
  emulator::copy16(shared, global);
#else
  const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
#endif
}
__device__ __forceinline__ void copy_async_commit() {
#if defined(K3_CUDA_EMULATED)
  emulator::copy_commit();
#else
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int N>
__device__ __forceinline__ void copy_async_wait() {
#if defined(K3_CUDA_EMULATED)
  emulator::copy_wait(N);
#else
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}

// --- matrix units. Lane l: g = l / 4, t = l % 4.

// d[16x8] += a[16x16] * b[16x8], bf16 in, float32 out. a: {(g, 2t..), (g+8, 2t..), (g, 2t+8..),
// (g+8, 2t+8..)}; b: {(k 2t.., n g), (k 2t+8.., n g)}; d: {(g, 2t), (g, 2t+1), (g+8, 2t), (g+8,
// 2t+1)}.
__device__ __forceinline__ void mma_16x8x16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                            uint32_t b1) {
#if defined(K3_CUDA_EMULATED)
  emulator::mma_16x8x16(d, a, b0, b1);
#else
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// Four 8x8 matrices of 16-bit elements from shared memory, transposed. Lane l names a row of 16
// bytes: rows 0-7 of matrix l / 8. r[i] of lane l holds elements (2t, g) and (2t+1, g) of matrix i.
__device__ __forceinline__ void load_matrix_x4_trans(uint32_t (&r)[4], const void* shared_row) {
#if defined(K3_CUDA_EMULATED)
  emulator::load_matrix_x4_trans(r, shared_row);
#else
  const auto at = static_cast<uint32_t>(__cvta_generic_to_shared(shared_row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(at)
               : "memory");
#endif
}

// --- dependent launches (launch.h). Every block of every kernel calls wait_for_inputs() once,
// before it reads what an earlier kernel wrote or writes anything; weights may be read before it.

__device__ __forceinline__ void wait_for_inputs() {
#if defined(K3_CUDA_EMULATED)
  emulator::wait_for_inputs();
#else
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// From here on the next kernel's blocks may start (they wait in turn).
__device__ __forceinline__ void let_next_start() {
#if defined(K3_CUDA_EMULATED)
  emulator::let_next_start();
#else
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// --- reductions over a warp, the same order on every lane: l with l ^ 16, then ^ 8, 4, 2, 1.

__device__ __forceinline__ float warp_sum(float x) {
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
  return x;
}
__device__ __forceinline__ float warp_max(float x) {
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, step));
  return x;
}

// --- elementary functions: the formulas of cpu/kernels/math.h, operation by operation.

__device__ __forceinline__ float expm1_reduced(float r) {
  float p = 1.f / 5040.f;
  p = fmaf(p, r, 1.f / 720.f);
  p = fmaf(p, r, 1.f / 120.f);
  p = fmaf(p, r, 1.f / 24.f);
  p = fmaf(p, r, 1.f / 6.f);
  p = fmaf(p, r, 0.5f);
  return fmaf(p * r, r, r);
}
__device__ __forceinline__ float reduce_ln2(float x, float* n) {
  *n = rintf(x * 1.44269504088896341f);
  return fmaf(*n, 2.12194440e-4f, fmaf(*n, -0.693359375f, x));
}
// 2^n for an integer n in [-126, 127].
__device__ __forceinline__ float pow2i(float n) {
  return __uint_as_float(static_cast<uint32_t>(static_cast<int>(n) + 127) << 23);
}
// Saturates outside [-87, 88]; NaN passes through.
__device__ __forceinline__ float exp_f32(float x) {
  if (!(x == x)) return x;
  x = fminf(88.f, fmaxf(-87.f, x));
  float n;
  const float r = reduce_ln2(x, &n);
  const float scale = pow2i(n);
  return fmaf(expm1_reduced(r), scale, scale);
}
__device__ __forceinline__ float sigmoid_f32(float x) { return 1.f / (1.f + exp_f32(0.f - x)); }
__device__ __forceinline__ float tanh_f32(float x) {
  if (!(x == x)) return x;
  const float y = fminf(40.f, fmaxf(-40.f, x + x));
  float n;
  const float r = reduce_ln2(y, &n);
  const float scale = pow2i(n);
  const float e = fmaf(expm1_reduced(r), scale, scale - 1.f);
  return e / (e + 2.f);
}
__device__ __forceinline__ float silu_f32(float x) { return x * sigmoid_f32(x); }
__device__ __forceinline__ float situ_f32(float g, float u, float beta, float linear_beta) {
  const float a = beta * tanh_f32(g / beta) * sigmoid_f32(g);
  return a * (linear_beta * tanh_f32(u / linear_beta));
}

#endif

}  // namespace k3::cuda
