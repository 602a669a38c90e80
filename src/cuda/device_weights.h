// The weights of a model on the card, in the layouts its kernels read: what reads the same input is
// one stack of rows, gate and up rows interleaved, a layer's experts one bank. One copy; loading
// stages through pinned memory in chunks.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "checkpoint/tensor_source.h"
#include "core/status.h"
#include "cuda/device_memory.h"
#include "cuda/kernels/experts.h"
#include "cuda/kernels/products.h"
#include "model/weights.h"

namespace k3::cuda {

struct DeviceAttnRes {
  const float* fold = nullptr;  // [hidden]
  const float* gain = nullptr;  // the RMSNorm that follows the mix, [hidden]
};

struct DeviceKda {
  PackedMatrix in;  // q, k, v, g, b, f_a, each padded to 16 rows
  PackedMatrix f_b, o;
  const float *q_conv = nullptr, *k_conv = nullptr, *v_conv = nullptr;
  const float *exp_a = nullptr, *dt_bias = nullptr, *o_norm = nullptr;
};

struct DeviceMla {
  PackedMatrix in;  // q_a, kv_a, g
  PackedMatrix q_b, o;
  PackedMatrix w_uk, w_uv;  // of head 0: [kv_lora_rank, nope], [v, kv_lora_rank]; heads follow
  int64_t w_uk_stride = 0, w_uv_stride = 0;  // uint4 elements from head to head
  const float *q_gain = nullptr, *kv_gain = nullptr;
};

struct DeviceMoe {
  PackedMatrix in;  // router, latent down, shared gate and up interleaved
  PackedMatrix latent_up, shared_down;
  const float* bias = nullptr;
  const float* latent_gain = nullptr;
  ExpertBank experts;
};

struct DeviceLayer {
  DeviceAttnRes attention_res, mlp_res;
  DeviceKda kda;  // by kind
  DeviceMla mla;
  PackedMatrix gate_up, down;  // dense layers
  DeviceMoe moe;
};

// Progress in bytes of the checkpoint.
using LoadProgress = std::function<void(int64_t done, int64_t total)>;

class DeviceWeights {
 public:
  // Bytes on the card, before anything is read. Errors: kCheckpoint for dimensions the kernels do
  // not take (the key, the value and what is expected).
  static Result<int64_t> plan(const ModelWeights& weights);
  // Bytes on the card that loading needs besides.
  static int64_t staging_bytes(const ModelWeights& weights);
  // Errors: kMemory, kDevice; kCheckpoint naming the tensor for a block scale out of range.
  static Result<std::unique_ptr<DeviceWeights>> load(const ModelWeights& weights,
                                                     const TensorSource& source,
                                                     const LoadProgress& progress);

  int64_t bytes() const { return arena_.bytes(); }
  const std::byte* data() const { return arena_.data(); }
  double load_seconds() const { return load_seconds_; }
  int64_t source_bytes() const { return source_bytes_; }  // read or made up

  const bf16* embed_tokens = nullptr;  // [vocab, hidden]
  PackedMatrix lm_head;
  DeviceAttnRes output_res;
  std::vector<DeviceLayer> layers;

 private:
  friend class WeightLayout;
  DeviceArena arena_;
  double load_seconds_ = 0;
  int64_t source_bytes_ = 0;
};

}  // namespace k3::cuda
