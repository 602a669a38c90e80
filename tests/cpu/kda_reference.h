// Kimi Delta Attention of one head from the equations (spec 3.3), in Balls, with its wrong twins.
//
// The bound over many tokens: a token maps the state's error e (a row over k) to
// (I - beta k k^T) diag(a) e, which is no longer than e because a <= 1 and 0 <= beta |k|^2 <= 1. So
// a row's error grows by no more than what each token rounds: the reference takes the token's local
// bound at the exact state and adds up its length. Reading with q adds |q| |e|.
#pragma once

#include "cpu/stage_gate.h"

namespace k3::gate {

struct KdaCase {
  int64_t tokens = 0, dim = 0, width = 4;
  std::vector<float> q, k, v, gate, decay, beta;               // [tokens][dim], [tokens]
  std::vector<float> q_conv, k_conv, v_conv, dt_bias, o_norm;  // [width][dim], [dim]
  std::vector<float> window, state;                            // given when not fresh
  float exp_a = 1.5f, gate_lower_bound = -5, rms_eps = 1e-5f, l2_eps = 1e-6f;
  bool fresh = true, bf16 = false;
};

inline KdaCase kda_case(Random& random, int64_t tokens, int64_t dim, bool bf16, double sd = 1) {
  KdaCase c;
  c.tokens = tokens;
  c.dim = dim;
  c.bf16 = bf16;
  const auto rows = [&](double s) { return random.normals(tokens * dim, s, bf16); };
  c.q = rows(sd);
  c.k = rows(sd);
  c.v = rows(sd);
  c.gate = rows(2);
  c.decay = rows(2);
  c.beta = random.normals(tokens, 2, bf16);
  c.q_conv = random.normals(c.width * dim, 0.5);
  c.k_conv = random.normals(c.width * dim, 0.5);
  c.v_conv = random.normals(c.width * dim, 0.5);
  c.dt_bias = random.normals(dim, 2);
  for (float& b : c.dt_bias) b -= 4;  // as in the release: most channels remember
  c.o_norm = random.normals(dim, 1);
  c.window = random.normals(3 * (c.width - 1) * dim, sd, bf16);
  c.state = random.normals(dim * dim, 0.5);
  return c;
}

enum class KdaTwin {
  kNone,
  kClampedGate,     // max(-exp_a softplus(x), bound) instead of bound * sigmoid(exp_a x)
  kNoExpA,          // decay without exp(A_log)
  kUndecayedDelta,  // predicts with the state before its decay
  kReadBeforeWrite,
  kTransposedState,  // reads [k][v]
  kNoQueryScale,
  kL2EpsOnMean,
  kL2EpsOutside,  // x / max(|x|, eps)
  kRawBeta,
  kDecayValueAxis,  // decays rows v instead of columns k
  kReversedTaps,
  kWindowNewestFirst,
  kNoSilu,
  kBf16State,        // rounds the state every sixteen tokens
  kLandsBeforeSilu,  // bf16 only
  kNoReadLanding,    // bf16 only
  kGateLandsAlone,   // bf16 only
};

struct KdaWant {
  Balls out;    // [tokens][dim]
  Balls state;  // [v][k]
  std::vector<float> window;
  // What the recurrence was given, in float64, for other forms of it: [tokens][dim] and [tokens].
  std::vector<double> q, k, v, g, beta, read;
};

namespace kda_detail {

// The raw projection of token t (t < 0: from the window), channel i.
inline double raw(const KdaCase& c, const std::vector<float>& x, int64_t which, int64_t t,
                  int64_t i, KdaTwin twin) {
  const int64_t history = c.width - 1;
  if (t >= 0) return x[static_cast<size_t>(t * c.dim + i)];
  if (c.fresh) return 0;
  const int64_t age = twin == KdaTwin::kWindowNewestFirst ? -1 - t : history + t;
  return c.window[static_cast<size_t>((which * history + age) * c.dim + i)];
}

inline Balls conv_silu(const KdaCase& c, const std::vector<float>& x,
                       const std::vector<float>& taps, int64_t which, int64_t t, KdaTwin twin) {
  Balls y;
  for (int64_t i = 0; i < c.dim; ++i) {
    Ball acc = exactly(0);
    for (int64_t j = 0; j < c.width; ++j) {
      const int64_t tap = twin == KdaTwin::kReversedTaps ? c.width - 1 - j : j;
      acc = fused(exactly(taps[static_cast<size_t>(tap * c.dim + i)]),
                  exactly(raw(c, x, which, t - (c.width - 1) + j, i, twin)), acc);
    }
    if (twin == KdaTwin::kLandsBeforeSilu) acc = land(acc, c.bf16);
    y.push_back(land(twin == KdaTwin::kNoSilu ? acc : acc * sigmoid(acc), c.bf16));
  }
  return y;
}

inline void l2_normalise(Balls& x, float eps, KdaTwin twin) {
  const auto n = static_cast<int64_t>(x.size());
  const Ball sum = sum_of_squares(x.data(), n);
  Ball r = inverse_root(sum, 1, eps);
  if (twin == KdaTwin::kL2EpsOnMean) r = inverse_root(sum, 1, eps * static_cast<float>(n));
  if (twin == KdaTwin::kL2EpsOutside) r = exactly(1 / std::max(std::sqrt(sum.v), double{eps}));
  for (Ball& v : x) v = v * r;
}

inline double length(const Balls& x, double Ball::*part) {
  double s = 0;
  for (const Ball& b : x) s += b.*part * (b.*part);
  return std::sqrt(s);
}

}  // namespace kda_detail

inline KdaWant kda_reference(const KdaCase& c, KdaTwin twin = KdaTwin::kNone) {
  using namespace kda_detail;
  const int64_t d = c.dim, history = c.width - 1;
  const auto at = [d](int64_t a, int64_t b) { return static_cast<size_t>(a * d + b); };
  KdaWant want;
  std::vector<double> s(static_cast<size_t>(d * d)), off(static_cast<size_t>(d));
  if (!c.fresh) s.assign(c.state.begin(), c.state.end());
  for (int64_t t = 0; t < c.tokens; ++t) {
    Balls q = conv_silu(c, c.q, c.q_conv, 0, t, twin);
    Balls k = conv_silu(c, c.k, c.k_conv, 1, t, twin);
    const Balls v = conv_silu(c, c.v, c.v_conv, 2, t, twin);
    l2_normalise(q, c.l2_eps, twin);
    l2_normalise(k, c.l2_eps, twin);
    if (twin != KdaTwin::kNoQueryScale) {
      const Ball scale = exactly(1) / sqrt(exactly(static_cast<double>(d)));
      for (Ball& x : q) x = x * scale;
    }
    Balls a;
    for (int64_t i = 0; i < d; ++i) {
      const Ball x = exactly(c.decay[at(t, i)]) + exactly(c.dt_bias[static_cast<size_t>(i)]);
      const Ball z = twin == KdaTwin::kNoExpA ? x : exactly(c.exp_a) * x;
      Ball g = exactly(c.gate_lower_bound) * sigmoid(z);
      if (twin == KdaTwin::kClampedGate) {
        g = exactly(std::max<double>(-c.exp_a * std::log1p(std::exp(x.v)), c.gate_lower_bound));
      }
      want.g.push_back(g.v);
      a.push_back(exp(g));
    }
    const Ball logit = exactly(c.beta[static_cast<size_t>(t)]);
    const Ball beta = twin == KdaTwin::kRawBeta ? logit : sigmoid(logit);
    for (const Ball& x : q) want.q.push_back(x.v);
    for (const Ball& x : k) want.k.push_back(x.v);
    for (const Ball& x : v) want.v.push_back(x.v);
    want.beta.push_back(beta.v);

    const std::vector<double> before = s;
    Balls read;
    for (int64_t j = 0; j < d; ++j) {
      Balls decayed, undecayed, updated;
      for (int64_t i = 0; i < d; ++i) {
        undecayed.push_back(exactly(before[at(j, i)]));
        decayed.push_back(undecayed.back() *
                          a[static_cast<size_t>(twin == KdaTwin::kDecayValueAxis ? j : i)]);
      }
      const Balls& seen = twin == KdaTwin::kUndecayedDelta ? undecayed : decayed;
      const Ball step = beta * (v[static_cast<size_t>(j)] - dot(seen.data(), k.data(), d));
      for (int64_t i = 0; i < d; ++i) {
        const auto n = static_cast<size_t>(i);
        updated.push_back(fused(step, k[n], decayed[n]));
        s[at(j, i)] = updated[n].v;
      }
      const Balls& source = twin == KdaTwin::kReadBeforeWrite ? decayed : updated;
      Ball o = dot(source.data(), q.data(), d);
      double& e = off[static_cast<size_t>(j)];
      e += length(updated, &Ball::r);
      o.r += e * (length(q, &Ball::v) + length(q, &Ball::r));
      read.push_back(o);
    }
    if (twin == KdaTwin::kBf16State && t % 16 == 15) {
      for (double& x : s) x = nearest_bf16(x);
    }
    if (twin == KdaTwin::kTransposedState) {
      for (int64_t j = 0; j < d; ++j) {
        read[static_cast<size_t>(j)].v = 0;
        for (int64_t i = 0; i < d; ++i) {
          read[static_cast<size_t>(j)].v += s[at(i, j)] * q[static_cast<size_t>(i)].v;
        }
      }
    }
    for (Ball& o : read) {
      want.read.push_back(o.v);
      if (twin != KdaTwin::kNoReadLanding) o = land(o, c.bf16);
    }
    const Ball r = inverse_root(sum_of_squares(read.data(), d), static_cast<double>(d), c.rms_eps);
    for (int64_t j = 0; j < d; ++j) {
      const auto n = static_cast<size_t>(j);
      Ball y = read[n] * r * exactly(c.o_norm[n]);
      Ball gate = sigmoid(exactly(c.gate[at(t, j)]));
      if (twin == KdaTwin::kGateLandsAlone) {
        y = land(y, c.bf16);
        gate = land(gate, c.bf16);
      }
      want.out.push_back(land(y * gate, c.bf16));
    }
  }
  for (int64_t j = 0; j < d; ++j) {
    for (int64_t i = 0; i < d; ++i) {
      want.state.push_back({s[at(j, i)], off[static_cast<size_t>(j)]});
    }
  }
  const std::vector<float>* x[3] = {&c.q, &c.k, &c.v};
  for (int64_t which = 0; which < 3; ++which) {
    for (int64_t age = 0; age < history; ++age) {
      for (int64_t i = 0; i < d; ++i) {
        want.window.push_back(static_cast<float>(
            raw(c, *x[which], which, c.tokens - history + age, i, KdaTwin::kNone)));
      }
    }
  }
  return want;
}

struct KdaGot {
  std::vector<float> out, state, window;
};

// Tokens [first, first + count) of the case through the kernel, on the given state and window;
// strides wider than the data, as in the workspace.
inline void kda_run(const Kernels& kernels, const KdaCase& c, int64_t first, int64_t count,
                    bool fresh, KdaGot* got) {
  const int64_t d = c.dim, stride = d + 3;
  const auto widen = [&](const std::vector<float>& x, int64_t by) {
    std::vector<float> wide = poisoned(count * by);
    for (int64_t t = 0; t < count; ++t) {
      std::copy_n(x.begin() + (first + t) * d, d, wide.begin() + t * by);
    }
    return wide;
  };
  const std::vector<float> q = widen(c.q, stride), k = widen(c.k, stride), v = widen(c.v, stride);
  const std::vector<float> gate = widen(c.gate, stride + 1), decay = widen(c.decay, stride + 2);
  std::vector<float> out = poisoned(count * (stride + 4));
  std::vector<float> scratch = poisoned(kda_scratch_floats(d));
  std::vector<float> beta = poisoned(3 * count);
  for (int64_t t = 0; t < count; ++t) {
    beta[static_cast<size_t>(3 * t)] = c.beta[static_cast<size_t>(first + t)];
  }
  KdaArgs a;
  a.tokens = count;
  a.head_dim = d;
  a.conv_width = c.width;
  a.q = q.data();
  a.k = k.data();
  a.v = v.data();
  a.qkv_stride = stride;
  a.gate = gate.data();
  a.gate_stride = stride + 1;
  a.decay = decay.data();
  a.decay_stride = stride + 2;
  a.beta = beta.data();
  a.beta_stride = 3;
  a.q_conv = c.q_conv.data();
  a.k_conv = c.k_conv.data();
  a.v_conv = c.v_conv.data();
  a.conv_stride = d;
  a.dt_bias = c.dt_bias.data();
  a.exp_a = c.exp_a;
  a.gate_lower_bound = c.gate_lower_bound;
  a.o_norm = c.o_norm.data();
  a.rms_eps = c.rms_eps;
  a.l2_eps = c.l2_eps;
  a.fresh = fresh;
  a.window = got->window.data();
  a.state = got->state.data();
  a.out = out.data();
  a.out_stride = stride + 4;
  a.scratch = scratch.data();
  a.bf16 = c.bf16;
  kernels.kda(a);
  for (int64_t t = 0; t < count; ++t) {
    got->out.insert(got->out.end(), out.begin() + t * a.out_stride,
                    out.begin() + t * a.out_stride + d);
  }
}

// The case in segments of the given lengths. A fresh case starts on poisoned state and window.
inline KdaGot kda_run(const Kernels& kernels, const KdaCase& c,
                      const std::vector<int64_t>& segments) {
  KdaGot got;
  got.state = c.fresh ? poisoned(c.dim * c.dim) : c.state;
  got.window = c.fresh ? poisoned(3 * (c.width - 1) * c.dim) : c.window;
  int64_t first = 0;
  for (const int64_t count : segments) {
    kda_run(kernels, c, first, count, c.fresh && first == 0, &got);
    first += count;
  }
  return got;
}
inline KdaGot kda_run(const Kernels& kernels, const KdaCase& c) {
  return kda_run(kernels, c, {c.tokens});
}

}  // namespace k3::gate
