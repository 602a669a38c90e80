// The CPU's kernels as one table per instruction set, chosen once at start. All pointers are
// float32 unless said otherwise; weights are raw checkpoint bytes and may be unaligned. `bf16` /
// `land_bf16` says whether results land in bf16 (the numerics policy, docs/numerics.md). No kernel
// allocates.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "core/status.h"

namespace k3 {

// y[y_index[r], n - y_column] = sum_k x[x_index[r], k] * w[n, k], n in [n_begin, n_end), r in [0,
// rows).
struct GemmArgs {
  const float* x = nullptr;
  int64_t ldx = 0;
  const int32_t* x_index = nullptr;  // null: row r itself
  int64_t rows = 0;
  int64_t k = 0;
  const std::byte* w = nullptr;  // row n at w + n * w_stride bytes
  int64_t w_stride = 0;
  const std::byte* scale = nullptr;  // MXFP4: E8M0, [n, k / 32]
  int64_t n_begin = 0, n_end = 0;
  int64_t y_column = 0;  // the n that lands in column 0 of y
  float* y = nullptr;
  int64_t ldy = 0;
  const int32_t* y_index = nullptr;
  float* scratch = nullptr;  // MXFP4: kMxfp4Tile * k floats of this thread's
  bool land_bf16 = false;
};
inline constexpr int64_t kMxfp4Tile = 8;

// RMSNorm. f32 policy: x * r * gain. bf16 policy: bf(bf(x * r) * gain). Spec 3.
struct RmsNormArgs {
  const float* x = nullptr;
  const float* gain = nullptr;
  int64_t n = 0;
  float eps = 0;
  float* y = nullptr;  // may be x
  bool bf16 = false;
};

// One token's attention-residual mix. Candidates: `count` snapshots, oldest first, then the stream.
//   score_i = rsqrt(mean(v_i^2) + eps) * sum_d v_i[d] fold[d];  out = sum_i softmax(score)_i v_i
struct AttnResArgs {
  const float* snapshots = nullptr;  // candidate i at snapshots + i * snapshot_stride
  int64_t snapshot_stride = 0;       // floats
  int64_t count = 0;
  const float* stream = nullptr;
  const float* fold = nullptr;  // norm.weight * proj.weight, [n]
  int64_t n = 0;
  float eps = 0;
  float* out = nullptr;
  bool bf16 = false;
};
inline constexpr int64_t kMaxSnapshots = 255;

// One head of one sequence's segment through short convolution, gated delta rule and output norm.
// D = head_dim. Pointers q, k, v, g, decay point at this head's D channels of token 0; tokens are
// `stride` floats apart.
struct KdaArgs {
  int64_t tokens = 0;
  int64_t head_dim = 0;
  int64_t conv_width = 0;
  const float *q = nullptr, *k = nullptr, *v = nullptr;  // raw projections (landed)
  int64_t qkv_stride = 0;
  const float* gate = nullptr;  // output gate logits
  int64_t gate_stride = 0;
  const float* decay = nullptr;  // f_b output
  int64_t decay_stride = 0;
  const float* beta = nullptr;  // this head's beta logit of token 0
  int64_t beta_stride = 0;
  // Taps: [conv_width][D], rows conv_stride floats apart; the last multiplies the current token.
  const float *q_conv = nullptr, *k_conv = nullptr, *v_conv = nullptr;
  int64_t conv_stride = 0;
  const float* dt_bias = nullptr;  // [D]
  float exp_a = 0;                 // exp(A_log[head])
  float gate_lower_bound = 0;
  const float* o_norm = nullptr;  // [D]
  float rms_eps = 0;
  float l2_eps = 0;
  bool fresh = false;  // position 0: take state and window as zero, whatever they hold
  // In and out. window: [3 (q,k,v)][conv_width - 1][D], oldest first. state: [v][k].
  float* window = nullptr;
  float* state = nullptr;
  float* out = nullptr;  // this head's D channels of token 0
  int64_t out_stride = 0;
  float* scratch = nullptr;  // kda_scratch_floats(head_dim)
  bool bf16 = false;
};
constexpr int64_t kda_scratch_floats(int64_t head_dim) { return 4 * head_dim; }

// Heads [0, heads) of one row attend to tokens [0, context) of its sequence, in pages of 64.
//   score = scale * q . cache[t];  out = sum_t softmax_t cache[t][0:kv_lora]
// Online softmax, one page after another, tokens in order: bits depend on the row's position alone.
struct MlaAttendArgs {
  const float* q = nullptr;  // [heads][latent_dim]
  int64_t heads = 0;
  int64_t latent_dim = 0;  // kv_lora_rank + qk_rope_head_dim
  int64_t kv_lora_rank = 0;
  int64_t context = 0;
  const std::byte* cache = nullptr;  // this layer's pages: page p at cache + p * page_stride bytes
  int64_t page_stride = 0;
  bool cache_bf16 = false;  // rows of latent_dim bf16, else float32
  const int32_t* pages = nullptr;
  float scale = 0;
  float* out = nullptr;  // [heads][kv_lora_rank]
};
inline constexpr int64_t kMlaHeadBlock = 4;

// Router of one row: sigma = sigmoid(logits); top_k of sigma + bias, ties to the lower index, in
// descending order of choice; weights sigma / (sum + 1e-20) * scaling. Spec 3.5.
struct RouterArgs {
  const float* logits = nullptr;
  const float* bias = nullptr;
  int64_t num_experts = 0;
  int64_t top_k = 0;
  float scaling = 1;
  int32_t* ids = nullptr;
  float* weights = nullptr;
  float* scratch = nullptr;  // 2 * num_experts
};

struct Kernels {
  const char* name;
  void (*gemm_bf16)(const GemmArgs&);
  void (*gemm_f32)(const GemmArgs&);
  void (*gemm_mxfp4)(const GemmArgs&);
  // y[r, d] = sum_n x[r, n - n_begin] * w[n, d] for d in [0, k): the transposed product.
  void (*gemm_bf16_t)(const GemmArgs&);
  void (*rms_norm)(const RmsNormArgs&);
  void (*attn_res)(const AttnResArgs&);
  void (*kda)(const KdaArgs&);
  void (*mla_attend)(const MlaAttendArgs&);
  void (*router)(const RouterArgs&);
  // out = situ(g, u), landed.
  void (*situ)(const float* g, const float* u, float* out, int64_t n, float beta, float linear_beta,
               bool bf16);
  // x = land(x * land(sigmoid(gate))): MLA's output gate.
  void (*sigmoid_gate)(float* x, const float* gate, int64_t n, bool bf16);
  // y = land(a + b); y may be a.
  void (*add)(const float* a, const float* b, float* y, int64_t n, bool bf16);
  // y = land(sum_s w[s] * rows[s * stride ...]) in ascending s.
  void (*combine)(const float* rows, int64_t stride, const float* weights, int64_t count, float* y,
                  int64_t n, bool bf16);
  void (*bf16_to_f32)(const std::byte* in, float* out, int64_t n);
  void (*f32_to_bf16)(const float* in, std::byte* out, int64_t n);
  // For tests of the elementary functions: y = f(x).
  void (*exp)(const float* x, float* y, int64_t n);
  void (*sigmoid)(const float* x, float* y, int64_t n);
  void (*tanh)(const float* x, float* y, int64_t n);
};

// "avx512", "avx2" or "portable". `auto` takes the best this machine runs. kInvalidArgument for a
// name that is unknown, not built or not supported by the machine.
Result<const Kernels*> select_kernels(const std::string& isa);

}  // namespace k3
