// Each kernel family of src/cpu/kernels by itself, at k3-nano's and at the release's widths, on
// every instruction set this machine has. Weights rotate through a buffer larger than the caches,
// so that bytes per second can be held against the read ceiling that `k3 bench` prints.
#include <benchmark/benchmark.h>

#include <cmath>
#include <random>
#include <vector>

#include "core/dtype.h"
#include "cpu/kernels/kernels.h"
#include "executor/executor.h"

namespace k3 {
namespace {

constexpr size_t kPastCaches = size_t{256} << 20;

const std::vector<std::byte>& weight_bytes() {
  static const std::vector<std::byte> bytes = [] {
    std::mt19937 random(1);
    std::vector<std::byte> b(kPastCaches);
    // bf16 patterns of small magnitude; as MXFP4 codes any byte will do.
    for (size_t i = 0; i < b.size(); i += 2) {
      b[i] = static_cast<std::byte>(random());
      b[i + 1] = static_cast<std::byte>(0x3c | (random() & 0x80));
    }
    return b;
  }();
  return bytes;
}

std::vector<float> random_floats(int64_t count) {
  std::mt19937 random(2);
  std::uniform_real_distribution<float> uniform(-1, 1);
  std::vector<float> v(static_cast<size_t>(count));
  for (float& x : v) x = uniform(random);
  return v;
}

using Gemm = void (*)(const GemmArgs&);

// rows x k against n columns; `row_bytes` of one weight row.
void gemm(benchmark::State& state, Gemm kernel, int64_t row_bytes, bool mxfp4) {
  const int64_t rows = state.range(0), n = state.range(1), k = state.range(2);
  const std::vector<float> x = random_floats(rows * k);
  std::vector<float> y(static_cast<size_t>(rows * n)), scratch(static_cast<size_t>(kMxfp4Tile * k));
  const std::vector<std::byte> scale(static_cast<size_t>(n * k / kMxfp4Group), std::byte{121});
  const auto matrix = static_cast<size_t>(n * row_bytes);
  size_t at = 0;
  for (auto _ : state) {
    GemmArgs a;
    a.x = x.data();
    a.ldx = k;
    a.rows = rows;
    a.k = k;
    a.w = weight_bytes().data() + at;
    a.w_stride = row_bytes;
    a.scale = scale.data();
    a.n_end = n;
    a.y = y.data();
    a.ldy = n;
    a.scratch = scratch.data();
    kernel(a);
    benchmark::DoNotOptimize(y.data());
    at += matrix;
    if (at + matrix > kPastCaches) at = 0;
  }
  state.SetBytesProcessed(state.iterations() * static_cast<int64_t>(matrix));
  state.counters["flop/s"] = benchmark::Counter(2.0 * static_cast<double>(rows * n * k),
                                                benchmark::Counter::kIsIterationInvariantRate);
  state.SetLabel(mxfp4 ? "mxfp4" : "bf16");
}

void kda(benchmark::State& state, const Kernels* kernels) {
  const int64_t tokens = state.range(0), d = 128;
  const std::vector<float> in = random_floats(tokens * d), taps = random_floats(4 * d);
  std::vector<float> out(in.size()), s(static_cast<size_t>(d * d)),
      window(static_cast<size_t>(9 * d)), scratch(static_cast<size_t>(kda_scratch_floats(d)));
  KdaArgs a;
  a.tokens = tokens;
  a.head_dim = d;
  a.conv_width = 4;
  a.q = a.k = a.v = a.gate = a.decay = a.beta = in.data();
  a.qkv_stride = a.gate_stride = a.decay_stride = a.beta_stride = a.out_stride = d;
  a.q_conv = a.k_conv = a.v_conv = taps.data();
  a.conv_stride = d;
  a.dt_bias = a.o_norm = taps.data();
  a.exp_a = 1;
  a.gate_lower_bound = -5;
  a.rms_eps = 1e-5f;
  a.l2_eps = 1e-6f;
  a.window = window.data();
  a.state = s.data();
  a.out = out.data();
  a.scratch = scratch.data();
  for (auto _ : state) {
    kernels->kda(a);
    benchmark::DoNotOptimize(out.data());
  }
  state.SetItemsProcessed(state.iterations() * tokens);
}

void mla(benchmark::State& state, const Kernels* kernels) {
  const int64_t context = state.range(0), heads = 4, dim = 576, rank = 512;
  const int64_t pages = (context + kPageTokens - 1) / kPageTokens;
  const std::vector<float> q = random_floats(heads * dim),
                           cache = random_floats(pages * kPageTokens * dim);
  std::vector<float> out(static_cast<size_t>(heads * rank));
  std::vector<int32_t> table(static_cast<size_t>(pages));
  for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<int32_t>(i);
  MlaAttendArgs a;
  a.q = q.data();
  a.heads = heads;
  a.latent_dim = dim;
  a.kv_lora_rank = rank;
  a.context = context;
  a.cache = reinterpret_cast<const std::byte*>(cache.data());
  a.page_stride = kPageTokens * dim * 4;
  a.pages = table.data();
  a.scale = 0.07f;
  a.out = out.data();
  for (auto _ : state) {
    kernels->mla_attend(a);
    benchmark::DoNotOptimize(out.data());
  }
  state.SetBytesProcessed(state.iterations() * context * dim * 4);
}

void register_all() {
  for (const char* isa : {"portable", "avx2", "avx512"}) {
    const Result<const Kernels*> found = select_kernels(isa);
    if (!found.ok()) continue;
    const Kernels* k = *found;
    const auto name = [isa](const char* family) { return cat(family, "/", isa); };
    for (const int64_t rows : {1, 16, 64}) {
      for (const auto& [n, width] : {std::pair<int64_t, int64_t>{256, 256}, {1024, 7168}}) {
        benchmark::RegisterBenchmark(name("gemm_bf16").c_str(), [k](benchmark::State& s) {
          gemm(s, k->gemm_bf16, s.range(2) * 2, false);
        })->Args({rows, n, width});
      }
      benchmark::RegisterBenchmark(name("gemm_mxfp4").c_str(), [k](benchmark::State& s) {
        gemm(s, k->gemm_mxfp4, s.range(2) / 2, true);
      })->Args({rows, 1024, 3584});
    }
    benchmark::RegisterBenchmark(name("kda").c_str(), [k](benchmark::State& s) { kda(s, k); })
        ->Arg(1)
        ->Arg(64);
    benchmark::RegisterBenchmark(name("mla_attend").c_str(),
                                 [k](benchmark::State& s) { mla(s, k); })
        ->Arg(128)
        ->Arg(4096);
  }
}

}  // namespace
}  // namespace k3

int main(int argc, char** argv) {
  k3::register_all();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
