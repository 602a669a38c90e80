// Short convolution, gated delta rule and output norm of one head against their equations.
#include "cpu/kda_reference.h"

#include "model/numerics.h"

namespace k3::gate {
namespace {

class Kda : public IsaTest {
 protected:
  void expect_holds(const KdaCase& c) const {
    const KdaWant want = kda_reference(c);
    const KdaGot got = kda_run(k(), c);
    EXPECT_WITHIN(got.out, want.out) << "dim " << c.dim << " tokens " << c.tokens;
    EXPECT_WITHIN(got.state, want.state) << "dim " << c.dim << " tokens " << c.tokens;
    EXPECT_SAME_BITS(got.window, want.window);
  }
};

TEST_P(Kda, IsTheEquationsFreshAndContinuedOnEveryWidth) {
  Random random(61);
  for (const bool bf16 : {false, true}) {
    for (const bool fresh : {false, true}) {
      for (const int64_t dim : {5, 16, 24, 33}) {
        for (const int64_t tokens : {1, 2, 3, 4, 9}) {
          KdaCase c = kda_case(random, tokens, dim, bf16);
          c.fresh = fresh;
          expect_holds(c);
        }
      }
    }
  }
}

TEST_P(Kda, HoldsOverManyTokensFromAState) {
  Random random(62);
  for (const bool bf16 : {false, true}) {
    KdaCase c = kda_case(random, 300, 32, bf16);
    c.fresh = false;
    expect_holds(c);
  }
}

// Some fast kernels round the carried state to bf16 every sixteen tokens. The bound sees that.
TEST_P(Kda, TheManyTokenBoundSeesAStateCarriedInBf16) {
  Random random(63);
  const KdaCase c = kda_case(random, 300, 32, false);
  const KdaWant want = kda_reference(c);
  EXPECT_WITHIN(kda_run(k(), c).state, want.state);
  EXPECT_TRIPS(kda_reference(c, KdaTwin::kBf16State).state, want.state);
}

TEST_P(Kda, WrongTwinsTrip) {
  Random random(64);
  for (const bool bf16 : {false, true}) {
    KdaCase c = kda_case(random, 6, 20, bf16, 0.3);
    c.fresh = false;
    const KdaWant want = kda_reference(c);
    const KdaGot got = kda_run(k(), c);
    EXPECT_WITHIN(got.out, want.out);
    std::vector<KdaTwin> twins = {KdaTwin::kClampedGate,       KdaTwin::kNoExpA,
                                  KdaTwin::kUndecayedDelta,    KdaTwin::kReadBeforeWrite,
                                  KdaTwin::kTransposedState,   KdaTwin::kRawBeta,
                                  KdaTwin::kDecayValueAxis,    KdaTwin::kReversedTaps,
                                  KdaTwin::kWindowNewestFirst, KdaTwin::kNoSilu};
    if (bf16) {
      twins.insert(twins.end(),
                   {KdaTwin::kLandsBeforeSilu, KdaTwin::kNoReadLanding, KdaTwin::kGateLandsAlone});
    }
    for (const KdaTwin twin : twins) {
      EXPECT_TRIPS(kda_reference(c, twin).out, want.out) << static_cast<int>(twin) << " " << bf16;
    }
  }
}

// The output norm hides a factor on q unless the read-out is small against its epsilon.
TEST_P(Kda, TheQueryIsScaledByTheRootOfTheHeadDim) {
  Random random(65);
  KdaCase c = kda_case(random, 3, 32, false, 0.02);
  const KdaWant want = kda_reference(c);
  EXPECT_WITHIN(kda_run(k(), c).out, want.out);
  EXPECT_TRIPS(kda_reference(c, KdaTwin::kNoQueryScale).out, want.out);
}

// Near zero the L2 epsilon decides: added to the sum inside the root, 1e-6 by default. The model's
// logits do not show it.
TEST_P(Kda, TheL2EpsilonJoinsTheSumInsideTheRoot) {
  Random random(66);
  const NumericsPolicy policy;
  EXPECT_EQ(policy.l2_norm_eps, 1e-6f);
  EXPECT_EQ(policy.lora_norm_eps, 1e-5f);
  KdaCase c = kda_case(random, 4, 24, false, 5e-4);
  c.v = random.normals(4 * 24);  // the values stay of a normal size
  c.l2_eps = policy.l2_norm_eps;
  const KdaWant want = kda_reference(c);
  const KdaGot got = kda_run(k(), c);
  EXPECT_WITHIN(got.out, want.out);
  EXPECT_WITHIN(got.state, want.state);
  for (const KdaTwin twin : {KdaTwin::kL2EpsOnMean, KdaTwin::kL2EpsOutside}) {
    EXPECT_TRIPS(kda_reference(c, twin).out, want.out) << static_cast<int>(twin);
    EXPECT_TRIPS(kda_reference(c, twin).state, want.state) << static_cast<int>(twin);
  }
  KdaCase other = c;
  other.l2_eps = 1e-5f;
  EXPECT_TRIPS(kda_run(k(), other).state, want.state);
  // All zeros: nothing divides by zero.
  std::fill(c.q.begin(), c.q.end(), 0.f);
  std::fill(c.k.begin(), c.k.end(), 0.f);
  for (const float s : kda_run(k(), c).state) EXPECT_EQ(s, 0);
}

TEST_P(Kda, FreshIgnoresWhateverStateAndWindowHold) {
  Random random(67);
  KdaCase c = kda_case(random, 5, 21, false);
  const KdaGot on_nan = kda_run(k(), c);
  KdaCase zero = c;
  zero.fresh = false;
  std::fill(zero.state.begin(), zero.state.end(), 0.f);
  std::fill(zero.window.begin(), zero.window.end(), 0.f);
  const KdaGot on_zero = kda_run(k(), zero);
  EXPECT_SAME_BITS(on_nan.out, on_zero.out);
  EXPECT_SAME_BITS(on_nan.state, on_zero.state);
  EXPECT_SAME_BITS(on_nan.window, on_zero.window);
  c.fresh = false;
  EXPECT_OTHER_BITS(kda_run(k(), c).out, on_zero.out) << "continuing must read them";
}

TEST_P(Kda, SegmentsOfAnyLengthGiveTheBitsOfOne) {
  Random random(68);
  for (const bool bf16 : {false, true}) {
    for (const bool fresh : {false, true}) {
      KdaCase c = kda_case(random, 12, 18, bf16);
      c.fresh = fresh;
      const KdaGot whole = kda_run(k(), c);
      for (const std::vector<int64_t>& segments :
           {std::vector<int64_t>(12, 1), {1, 2, 9}, {2, 3, 1, 6}, {11, 1}}) {
        const KdaGot parts = kda_run(k(), c, segments);
        EXPECT_SAME_BITS(parts.out, whole.out);
        EXPECT_SAME_BITS(parts.state, whole.state);
        EXPECT_SAME_BITS(parts.window, whole.window);
      }
      // Losing the window between two segments must show.
      KdaGot lost;
      lost.state = c.fresh ? poisoned(18 * 18) : c.state;
      lost.window = c.fresh ? poisoned(9 * 18) : c.window;
      kda_run(k(), c, 0, 5, c.fresh, &lost);
      std::fill(lost.window.begin(), lost.window.end(), 0.f);
      kda_run(k(), c, 5, 7, false, &lost);
      EXPECT_OTHER_BITS(lost.out, whole.out);
    }
  }
}

TEST_P(Kda, OtherConvolutionWidths) {
  Random random(69);
  for (const int64_t width : {1, 2, 3, 6}) {
    for (const int64_t tokens : {1, 4}) {
      KdaCase c = kda_case(random, tokens, 17, false);
      c.width = width;
      c.q_conv = random.normals(width * 17, 0.5);
      c.k_conv = random.normals(width * 17, 0.5);
      c.v_conv = random.normals(width * 17, 0.5);
      c.window = random.normals(3 * (width - 1) * 17);
      c.fresh = false;
      expect_holds(c);
    }
  }
}

// The chunkwise form that other engines prefill with (chunk C, G the cumulative log-decay):
//   L = tril_strict(beta_i k+_i . k-_j), U = (I + L)^-1 diag(beta) (V - K+ S),
//   O = Q+ S + tril(q+_i . k-_j) U,  S <- diag(e^G_C) S + sum_i (k_i e^(G_C - G_i)) U_i^T
// with k+ = k e^G, q+ = q e^G, k- = k e^-G. It is the same function as the recurrence that ships.
struct Chunked {
  std::vector<double> read, state;  // state [v][k]
};
Chunked chunkwise(const KdaCase& c, const KdaWant& in, int64_t chunk, bool drop_correction) {
  const int64_t d = c.dim;
  const auto at = [d](int64_t a, int64_t b) { return static_cast<size_t>(a * d + b); };
  Chunked out;
  out.state.assign(static_cast<size_t>(d * d), 0);
  if (!c.fresh) out.state.assign(c.state.begin(), c.state.end());
  std::vector<double>& s = out.state;
  for (int64_t first = 0; first < c.tokens; first += chunk) {
    const int64_t n = std::min(chunk, c.tokens - first);
    std::vector<double> total(static_cast<size_t>(n * d));  // G
    for (int64_t t = 0; t < n; ++t) {
      for (int64_t i = 0; i < d; ++i) {
        total[at(t, i)] = in.g[at(first + t, i)] + (t > 0 ? total[at(t - 1, i)] : 0);
      }
    }
    const auto inner = [&](const std::vector<double>& x, int64_t a, int64_t b) {
      double sum = 0;  // x+_a . k-_b
      for (int64_t i = 0; i < d; ++i) {
        sum += x[at(first + a, i)] * in.k[at(first + b, i)] *
               std::exp(total[at(a, i)] - total[at(b, i)]);
      }
      return sum;
    };
    std::vector<double> u(static_cast<size_t>(n * d));
    for (int64_t t = 0; t < n; ++t) {  // forward substitution
      const double beta = in.beta[static_cast<size_t>(first + t)];
      for (int64_t j = 0; j < d; ++j) {
        double x = in.v[at(first + t, j)];
        for (int64_t i = 0; i < d; ++i) {
          x -= in.k[at(first + t, i)] * std::exp(total[at(t, i)]) * s[at(j, i)];
        }
        u[at(t, j)] = beta * x;
      }
      for (int64_t b = 0; b < t && !drop_correction; ++b) {
        const double l = beta * inner(in.k, t, b);
        for (int64_t j = 0; j < d; ++j) u[at(t, j)] -= l * u[at(b, j)];
      }
    }
    for (int64_t t = 0; t < n; ++t) {
      for (int64_t j = 0; j < d; ++j) {
        double o = 0;
        for (int64_t i = 0; i < d; ++i) {
          o += in.q[at(first + t, i)] * std::exp(total[at(t, i)]) * s[at(j, i)];
        }
        for (int64_t b = 0; b <= t; ++b) o += inner(in.q, t, b) * u[at(b, j)];
        out.read.push_back(o);
      }
    }
    for (int64_t j = 0; j < d; ++j) {
      for (int64_t i = 0; i < d; ++i) {
        double x = std::exp(total[at(n - 1, i)]) * s[at(j, i)];
        for (int64_t t = 0; t < n; ++t) {
          x += in.k[at(first + t, i)] * std::exp(total[at(n - 1, i)] - total[at(t, i)]) *
               u[at(t, j)];
        }
        s[at(j, i)] = x;
      }
    }
  }
  return out;
}

double farthest(const std::vector<double>& a, const std::vector<double>& b) {
  double far = a.size() == b.size() ? 0 : 1e300;
  for (size_t i = 0; i < a.size() && i < b.size(); ++i) far = std::max(far, std::abs(a[i] - b[i]));
  return far;
}

TEST_P(Kda, TheChunkwiseFormIsTheSameFunction) {
  Random random(70);
  for (const bool fresh : {false, true}) {
    KdaCase c = kda_case(random, 53, 20, false);  // three chunks of sixteen and five tokens
    c.fresh = fresh;
    const KdaWant want = kda_reference(c);
    const Chunked chunked = chunkwise(c, want, 16, false);
    EXPECT_LT(farthest(chunked.read, want.read), 1e-12);
    const KdaGot got = kda_run(k(), c);
    Balls state;
    for (size_t i = 0; i < want.state.size(); ++i) {
      EXPECT_NEAR(chunked.state[i], want.state[i].v, 1e-12);
      state.push_back({chunked.state[i], want.state[i].r});
    }
    EXPECT_WITHIN(got.state, state);
    const Chunked wrong = chunkwise(c, want, 16, true);
    EXPECT_GT(farthest(wrong.read, want.read), 1e-3);
  }
}

K3_EVERY_ISA(Kda);

}  // namespace
}  // namespace k3::gate
