// Every kernel gives the same bits on every instruction set: AVX-512 and AVX2 against the portable
// form, on tails, on large and small values, on infinities and NaN.
#include "cpu/kda_reference.h"
#include "executor/executor.h"

namespace k3::gate {
namespace {

using Run = std::vector<float> (*)(const Kernels&, Random&, int64_t n, bool bf16);

// Mostly normal; here and there a value that makes trouble.
std::vector<float> wild(Random& random, int64_t n) {
  std::vector<float> x = random.normals(n, 4);
  const float trouble[] = {kNaN,  kInf,   -kInf, 0.f,   -0.f,  1e-45f,   -1e-40f,
                           3e38f, -3e38f, 88.f,  -87.f, 87.3f, 1.2e-38f, -103.f};
  for (float& v : x) {
    if (random.integer(0, 9) == 0) v = trouble[random.integer(0, 13)];
  }
  return x;
}

template <void (*Kernels::*f)(const float*, float*, int64_t)>
std::vector<float> map(const Kernels& k, Random& random, int64_t n, bool) {
  const std::vector<float> x = wild(random, n);
  std::vector<float> y = poisoned(n);
  (k.*f)(x.data(), y.data(), n);
  return y;
}

std::vector<float> rms_norm(const Kernels& k, Random& random, int64_t n, bool bf16) {
  const std::vector<float> x = random.normals(n), gain = wild(random, n);
  std::vector<float> y = poisoned(n);
  k.rms_norm({x.data(), gain.data(), n, 1e-5f, y.data(), bf16});
  return y;
}

std::vector<float> attn_res(const Kernels& k, Random& random, int64_t n, bool bf16) {
  const std::vector<float> bank = random.normals(5 * n), stream = random.normals(n);
  const std::vector<float> fold = random.normals(n);
  std::vector<float> y = poisoned(n);
  k.attn_res({bank.data(), n, 5, stream.data(), fold.data(), n, 1e-5f, y.data(), bf16});
  return y;
}

std::vector<float> situ(const Kernels& k, Random& random, int64_t n, bool bf16) {
  const std::vector<float> g = wild(random, n), u = wild(random, n);
  std::vector<float> y = poisoned(n);
  k.situ(g.data(), u.data(), y.data(), n, 4, 25, bf16);
  return y;
}

std::vector<float> sigmoid_gate(const Kernels& k, Random& random, int64_t n, bool bf16) {
  std::vector<float> x = wild(random, n), gate = wild(random, n);
  k.sigmoid_gate(x.data(), gate.data(), n, bf16);
  return x;
}

std::vector<float> add(const Kernels& k, Random& random, int64_t n, bool bf16) {
  std::vector<float> a = wild(random, n), b = wild(random, n);
  k.add(a.data(), b.data(), a.data(), n, bf16);
  return a;
}

std::vector<float> combine(const Kernels& k, Random& random, int64_t n, bool bf16) {
  const std::vector<float> rows = wild(random, 7 * n), w = random.normals(7);
  std::vector<float> y = poisoned(n);
  k.combine(rows.data(), n, w.data(), 7, y.data(), n, bf16);
  return y;
}

std::vector<float> conversions(const Kernels& k, Random& random, int64_t n, bool) {
  const std::vector<float> x = wild(random, n);
  std::vector<std::byte> narrow(2 * x.size());
  k.f32_to_bf16(x.data(), narrow.data(), n);
  std::vector<float> y = poisoned(n);
  k.bf16_to_f32(narrow.data(), y.data(), n);
  return y;
}

enum class Form { kBf16, kF32, kMxfp4, kTransposed };
template <Form form>
std::vector<float> product(const Kernels& k, Random& random, int64_t n, bool bf16) {
  const int64_t rows = 1 + n % 7;
  const int64_t depth = form == Form::kMxfp4 ? 32 * (1 + n % 5) : 3 * n + 1;
  const std::vector<float> x = random.normals(rows * std::max(depth, n));
  std::vector<std::byte> scale = random.bytes(n * depth / 32 + 1, 0, 200);
  const std::vector<std::byte> w = form == Form::kMxfp4 ? random.bytes(n * depth / 2)
                                   : form == Form::kF32 ? f32_bytes(random.normals(n * depth))
                                                        : bf16_bytes(random.normals(n * depth));
  std::vector<float> y = poisoned(rows * std::max(depth, n)),
                     scratch = poisoned(kMxfp4Tile * depth);
  GemmArgs a;
  a.x = x.data();
  a.ldx = std::max(depth, n);
  a.rows = rows;
  a.k = depth;
  a.w = w.data();
  a.w_stride = static_cast<int64_t>(w.size()) / n;
  a.scale = scale.data();
  a.n_end = n;
  a.y = y.data();
  a.ldy = std::max(depth, n);
  a.scratch = scratch.data();
  a.land_bf16 = bf16;
  switch (form) {
    case Form::kBf16:
      k.gemm_bf16(a);
      break;
    case Form::kF32:
      k.gemm_f32(a);
      break;
    case Form::kMxfp4:
      k.gemm_mxfp4(a);
      break;
    case Form::kTransposed:
      k.gemm_bf16_t(a);
      break;
  }
  return y;
}

std::vector<float> kda(const Kernels& k, Random& random, int64_t n, bool bf16) {
  KdaCase c = kda_case(random, 7, n, bf16);
  c.fresh = n % 2 == 0;
  const KdaGot got = kda_run(k, c, {3, 4});
  std::vector<float> all = got.out;
  all.insert(all.end(), got.state.begin(), got.state.end());
  all.insert(all.end(), got.window.begin(), got.window.end());
  return all;
}

std::vector<float> mla(const Kernels& k, Random& random, int64_t n, bool bf16) {
  const int64_t heads = 1 + n % 4, latent = n + 6, context = 40 + 3 * n;
  const std::vector<float> q = random.normals(heads * latent);
  const std::vector<float> rows = random.normals(4 * kPageTokens * latent);
  const std::vector<std::byte> cache = bf16 ? bf16_bytes(rows) : f32_bytes(rows);
  const std::vector<int32_t> pages = {2, 0, 3, 1};
  std::vector<float> out = poisoned(heads * n);
  MlaAttendArgs a;
  a.q = q.data();
  a.heads = heads;
  a.latent_dim = latent;
  a.kv_lora_rank = n;
  a.context = context;
  a.cache = cache.data();
  a.page_stride = kPageTokens * latent * (bf16 ? 2 : 4);
  a.cache_bf16 = bf16;
  a.pages = pages.data();
  a.scale = 0.3f;
  a.out = out.data();
  k.mla_attend(a);
  return out;
}

std::vector<float> router(const Kernels& k, Random& random, int64_t n, bool) {
  const int64_t top_k = std::min<int64_t>(n, 8);
  const std::vector<float> logits = wild(random, n), bias = random.normals(n, 0.1);
  std::vector<int32_t> ids(static_cast<size_t>(top_k), -1);
  std::vector<float> out = poisoned(top_k), scratch = poisoned(2 * n);
  k.router({logits.data(), bias.data(), n, top_k, 2.5f, ids.data(), out.data(), scratch.data()});
  out.insert(out.end(), ids.begin(), ids.end());
  return out;
}

struct Operation {
  const char* name;
  Run run;
};
const Operation kOperations[] = {
    {"exp", map<&Kernels::exp>},
    {"sigmoid", map<&Kernels::sigmoid>},
    {"tanh", map<&Kernels::tanh>},
    {"rms_norm", rms_norm},
    {"attn_res", attn_res},
    {"situ", situ},
    {"sigmoid_gate", sigmoid_gate},
    {"add", add},
    {"combine", combine},
    {"conversions", conversions},
    {"gemm_bf16", product<Form::kBf16>},
    {"gemm_f32", product<Form::kF32>},
    {"gemm_mxfp4", product<Form::kMxfp4>},
    {"gemm_bf16_t", product<Form::kTransposed>},
    {"kda", kda},
    {"mla_attend", mla},
    {"router", router},
};

class IsaBits : public IsaTest {};

TEST_P(IsaBits, AreThePortableBitsForEveryKernel) {
  const Kernels& portable = **select_kernels("portable");
  for (const Operation& op : kOperations) {
    for (const bool bf16 : {false, true}) {
      for (int64_t n = 1; n <= 50; ++n) {
        Random random(static_cast<uint32_t>(100 + n)), same(static_cast<uint32_t>(100 + n));
        ASSERT_EQ(bits_differ(op.run(k(), random, n, bf16), op.run(portable, same, n, bf16)), "")
            << op.name << " n " << n << " bf16 " << bf16;
      }
    }
  }
}

// The comparison is of bits: another seed, or one bf16 landing more, is another answer.
TEST_P(IsaBits, TheComparisonSeesOtherInputsAndALanding) {
  for (const Operation& op : kOperations) {
    Random a(7), b(8);
    EXPECT_OTHER_BITS(op.run(k(), a, 33, false), op.run(k(), b, 33, false)) << op.name;
  }
  Random a(7), b(7);
  EXPECT_OTHER_BITS(kda(k(), a, 33, false), kda(k(), b, 33, true));
}

INSTANTIATE_TEST_SUITE_P(, IsaBits, testing::Values("avx2", "avx512"),
                         [](const auto& isa) { return std::string(isa.param); });

}  // namespace
}  // namespace k3::gate
