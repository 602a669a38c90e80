// Latent attention over pages against the absorbed and the expanded form, both in float64.
#include <array>

#include "cpu/stage_gate.h"
#include "executor/executor.h"
#include "model/geometry.h"

namespace k3::gate {
namespace {

struct Case {
  int64_t heads = 3, rank = 40, rope = 8, nope = 12, v = 10, context = 0;
  bool bf16 = false;
  std::vector<float> q;        // [heads][nope + rope]
  std::vector<float> kv_b;     // [heads][nope + v][rank], bf16 values
  std::vector<float> latents;  // [context][rank + rope]
  std::vector<int32_t> pages;  // where each page of 64 lies
  std::vector<std::byte> cache;
  int64_t page_stride = 0;

  int64_t latent() const { return rank + rope; }
  float scale() const {
    return static_cast<float>(1 / std::sqrt(static_cast<double>(nope + rope)));
  }
  double at(int64_t t, int64_t d) const { return latents[static_cast<size_t>(t * latent() + d)]; }
};

// Writes the latents into the pages; everything else in the cache is NaN.
void fill_cache(Case* c) {
  const int64_t element = c->bf16 ? 2 : 4;
  const int64_t layer = kPageTokens * c->latent() * element;
  c->page_stride = 2 * layer;  // two MLA layers; ours is the first of each page
  int32_t last = 0;
  for (const int32_t p : c->pages) last = std::max(last, p);
  const std::vector<float> poison = poisoned((last + 1) * c->page_stride / element);
  c->cache = c->bf16 ? bf16_bytes(poison) : f32_bytes(poison);
  for (int64_t t = 0; t < c->context; ++t) {
    const std::vector<float> row(c->latents.begin() + t * c->latent(),
                                 c->latents.begin() + (t + 1) * c->latent());
    const std::vector<std::byte> bytes = c->bf16 ? bf16_bytes(row) : f32_bytes(row);
    const int64_t page = c->pages[static_cast<size_t>(t / kPageTokens)];
    std::copy(bytes.begin(), bytes.end(),
              c->cache.begin() + page * c->page_stride + t % kPageTokens * c->latent() * element);
  }
}

Case make(Random& random, int64_t heads, int64_t rank, int64_t context, bool bf16, double sd = 1) {
  Case c;
  c.heads = heads;
  c.rank = rank;
  c.context = context;
  c.bf16 = bf16;
  c.q = random.normals(heads * (c.nope + c.rope), sd, bf16);
  c.kv_b = random.normals(heads * (c.nope + c.v) * rank, 0.3, true);
  c.latents = random.normals(context * c.latent(), 1, bf16);
  const int64_t count = (context + kPageTokens - 1) / kPageTokens;
  for (int64_t p = 0; p < count; ++p) c.pages.push_back(static_cast<int32_t>((5 * p + 3) % 11));
  fill_cache(&c);
  return c;
}

enum class Twin {
  kNone,
  kNoScale,
  kScaleOfNope,
  kNoRope,
  kOneTokenShort,
  kPagesInOrder,
  kBf16Scale
};

// Scores in float64, with what float32 may be off by, from q's latent form (which may itself be
// off).
struct Attended {
  Balls out;              // [heads][rank]
  std::vector<double> p;  // [heads][context]
};

// The bound. A score is off by its dot's bound and one rounding of the scale; exp's argument by one
// rounding of s - top, at most 2 max|s| big; each page that raises the maximum shrinks what was
// summed, by one exp and one multiply, and the arguments of these add up to at most 2 max|s| once
// more. Then exp's own ulp and a bit, twice, and a chain of `context` adds, in numerator and
// denominator alike. Every term is relative to p_t |c_t|.
Attended attend(const Case& c, const Balls& q_latent, Twin twin = Twin::kNone) {
  Attended result;
  const int64_t context = c.context - (twin == Twin::kOneTokenShort ? 1 : 0);
  const double pages = static_cast<double>(c.pages.size());
  double scale = c.scale();
  if (twin == Twin::kNoScale) scale = 1;
  if (twin == Twin::kScaleOfNope) scale = 1 / std::sqrt(static_cast<double>(c.nope));
  if (twin == Twin::kBf16Scale) scale = nearest_bf16(scale);
  for (int64_t h = 0; h < c.heads; ++h) {
    const Ball* q = q_latent.data() + h * c.latent();
    std::vector<double> score;
    double off = 0, largest = 0, top = -1e300;
    for (int64_t t = 0; t < context; ++t) {
      Balls row;
      for (int64_t d = 0; d < c.latent(); ++d) row.push_back(exactly(c.at(t, d)));
      const int64_t used = twin == Twin::kNoRope ? c.rank : c.latent();
      const Ball s = dot(q, row.data(), used) * exactly(scale);
      score.push_back(s.v);
      off = std::max(off, s.r);
      largest = std::max(largest, std::abs(s.v) + s.r);
      top = std::max(top, s.v);
    }
    double sum = 0;
    for (double& s : score) sum += s = std::exp(s - top);
    const double relative =
        off + kUnit * (4 * largest + 4 + 6 * pages + 8 + static_cast<double>(context));
    for (int64_t d = 0; d < c.rank; ++d) {
      double o = 0, size = 0;
      for (int64_t t = 0; t < context; ++t) {
        const double p = score[static_cast<size_t>(t)] / sum;
        int64_t from = t;
        if (twin == Twin::kPagesInOrder) {
          // The first and the second page swapped, for the values alone.
          from = t < 2 * kPageTokens && context >= 2 * kPageTokens
                     ? (t + kPageTokens) % (2 * kPageTokens)
                     : t;
        }
        o += p * c.at(from, d);
        size += p * std::abs(c.at(from, d));
      }
      result.out.push_back(rounded(o, 2.1 * relative * size));
    }
    for (const double s : score) result.p.push_back(s / sum);
  }
  return result;
}

class Mla : public IsaTest {
 protected:
  std::vector<float> run(const Case& c, const std::vector<float>& q_latent, int64_t first,
                         int64_t heads) const {
    std::vector<float> out = poisoned(heads * c.rank);
    MlaAttendArgs a;
    a.q = q_latent.data() + first * c.latent();
    a.heads = heads;
    a.latent_dim = c.latent();
    a.kv_lora_rank = c.rank;
    a.context = c.context;
    a.cache = c.cache.data();
    a.page_stride = c.page_stride;
    a.cache_bf16 = c.bf16;
    a.pages = c.pages.data();
    a.scale = c.scale();
    a.out = out.data();
    k().mla_attend(a);
    return out;
  }
  std::vector<float> run(const Case& c, const std::vector<float>& q_latent) const {
    return run(c, q_latent, 0, c.heads);
  }
};

constexpr int64_t kContexts[] = {1, 2, 15, 17, 63, 64, 65, 128, 200, 300};

TEST_P(Mla, IsTheAbsorbedFormForEveryContextHeadCountAndCache) {
  Random random(81);
  for (const bool bf16 : {false, true}) {
    for (const int64_t context : kContexts) {
      for (int64_t heads = 1; heads <= kMlaHeadBlock; ++heads) {
        const Case c = make(random, heads, heads == 2 ? 37 : 40, context, bf16);
        const std::vector<float> q = random.normals(heads * c.latent());
        EXPECT_WITHIN(run(c, q), attend(c, exactly(q)).out)
            << context << " " << heads << " " << bf16;
      }
    }
  }
}

TEST_P(Mla, WrongTwinsTrip) {
  Random random(82);
  for (const bool bf16 : {false, true}) {
    const Case c = make(random, 3, 40, 150, bf16);
    const std::vector<float> q = random.normals(3 * c.latent());
    const Balls want = attend(c, exactly(q)).out;
    EXPECT_WITHIN(run(c, q), want);
    for (const Twin twin : {Twin::kNoScale, Twin::kScaleOfNope, Twin::kNoRope, Twin::kOneTokenShort,
                            Twin::kPagesInOrder, Twin::kBf16Scale}) {
      EXPECT_TRIPS(attend(c, exactly(q), twin).out, want) << static_cast<int>(twin);
    }
  }
}

// The whole head: absorb the query, attend, go back up through W_UV; against keys and values
// expanded from the latents as the model defines them.
TEST_P(Mla, AbsorbedEqualsExpanded) {
  Random random(83);
  for (const bool bf16 : {false, true}) {
    for (const int64_t context : {1, 70, 200}) {
      const Case c = make(random, 4, 40, context, bf16, 0.5);
      const std::vector<std::byte> kv_b = bf16_bytes(c.kv_b);
      const int64_t per_head = c.nope + c.v, qk = c.nope + c.rope;
      // The kernels.
      std::vector<float> q_latent = poisoned(c.heads * c.latent());
      std::vector<float> out = poisoned(c.heads * c.v);
      Balls absorbed;
      for (int64_t h = 0; h < c.heads; ++h) {
        GemmArgs a;
        a.x = c.q.data() + h * qk;
        a.ldx = qk;
        a.rows = 1;
        a.k = c.rank;
        a.w = kv_b.data();
        a.w_stride = 2 * c.rank;
        a.n_begin = h * per_head;
        a.n_end = a.n_begin + c.nope;
        a.y = q_latent.data() + h * c.latent();
        a.ldy = c.latent();
        k().gemm_bf16_t(a);
        std::copy_n(c.q.begin() + h * qk + c.nope, c.rope,
                    q_latent.begin() + h * c.latent() + c.rank);
        const Balls q = exactly({c.q.begin() + h * qk, c.q.begin() + (h + 1) * qk});
        for (int64_t d = 0; d < c.rank; ++d) {
          Balls column;
          for (int64_t n = 0; n < c.nope; ++n) {
            column.push_back(exactly(c.kv_b[static_cast<size_t>((h * per_head + n) * c.rank + d)]));
          }
          absorbed.push_back(dot(q.data(), column.data(), c.nope, static_cast<double>(c.nope)));
        }
        absorbed.insert(absorbed.end(), q.begin() + c.nope, q.end());
      }
      const std::vector<float> o_latent = run(c, q_latent);
      for (int64_t h = 0; h < c.heads; ++h) {
        GemmArgs a;
        a.x = o_latent.data() + h * c.rank;
        a.ldx = c.rank;
        a.rows = 1;
        a.k = c.rank;
        a.w = kv_b.data();
        a.w_stride = 2 * c.rank;
        a.n_begin = h * per_head + c.nope;
        a.n_end = (h + 1) * per_head;
        a.y_column = a.n_begin;
        a.y = out.data() + h * c.v;
        a.ldy = c.v;
        a.land_bf16 = bf16;
        k().gemm_bf16(a);
      }
      // Expanded, float64; the absorbed form's balls carry the bound.
      const Attended attended = attend(c, absorbed);
      Balls want, swapped;
      for (int64_t h = 0; h < c.heads; ++h) {
        const auto up = [&](int64_t row, int64_t t) {  // kv_b row of this head times latent t
          double sum = 0;
          for (int64_t d = 0; d < c.rank; ++d) {
            sum += static_cast<double>(
                       c.kv_b[static_cast<size_t>((h * per_head + row) * c.rank + d)]) *
                   c.at(t, d);
          }
          return sum;
        };
        std::vector<double> p;
        double sum = 0;
        for (int64_t t = 0; t < context; ++t) {
          double s = 0;
          for (int64_t n = 0; n < c.nope; ++n) {
            s += static_cast<double>(c.q[static_cast<size_t>(h * qk + n)]) * up(n, t);
          }
          for (int64_t n = 0; n < c.rope; ++n) {
            s += static_cast<double>(c.q[static_cast<size_t>(h * qk + c.nope + n)]) *
                 c.at(t, c.rank + n);
          }
          p.push_back(std::exp(s * c.scale()));
          sum += p.back();
        }
        for (int64_t t = 0; t < context; ++t) {
          EXPECT_NEAR(p[static_cast<size_t>(t)] / sum,
                      attended.p[static_cast<size_t>(h * context + t)], 1e-12);
        }
        for (int64_t n = 0; n < c.v; ++n) {
          double o = 0, wrong = 0;
          for (int64_t t = 0; t < context; ++t) {
            o += p[static_cast<size_t>(t)] / sum * up(c.nope + n, t);
            wrong += p[static_cast<size_t>(t)] / sum * up(n, t);  // W_UK in W_UV's place
          }
          Balls w;
          for (int64_t d = 0; d < c.rank; ++d) {
            w.push_back(
                exactly(c.kv_b[static_cast<size_t>((h * per_head + c.nope + n) * c.rank + d)]));
          }
          const Ball down = dot(attended.out.data() + h * c.rank, w.data(), c.rank);
          EXPECT_NEAR(down.v, o, 1e-12);
          want.push_back(land({o, down.r}, bf16));
          swapped.push_back(land({wrong, down.r}, bf16));
        }
      }
      EXPECT_WITHIN(out, want) << context << " " << bf16;
      EXPECT_TRIPS(swapped, want);
    }
  }
}

TEST_P(Mla, WherePagesLieAndWhoSharesTheLoadsDoNotChangeABit) {
  Random random(84);
  for (const bool bf16 : {false, true}) {
    Case c = make(random, 4, 40, 230, bf16);
    const std::vector<float> q = random.normals(4 * c.latent());
    const std::vector<float> want = run(c, q);
    c.pages = {9, 0, 4, 2};
    fill_cache(&c);
    EXPECT_SAME_BITS(run(c, q), want);
    for (int64_t heads = 1; heads <= 4; ++heads) {
      for (int64_t first = 0; first + heads <= 4; ++first) {
        const std::vector<float> some = run(c, q, first, heads);
        EXPECT_SAME_BITS(some, std::vector<float>(want.begin() + first * c.rank,
                                                  want.begin() + (first + heads) * c.rank));
      }
    }
    std::swap(c.pages[0], c.pages[2]);  // the table wrong, the cache as it was
    EXPECT_OTHER_BITS(run(c, q), want);
  }
}

TEST_P(Mla, LargeScoresNeitherOverflowNorLoseTheLastToken) {
  Random random(85);
  Case c = make(random, 2, 40, 131, false);
  const std::vector<float> q = random.normals(2 * c.latent(), 30);
  // exp saturates at e^-87 of the top; what float64 makes of it is smaller still.
  EXPECT_WITHIN(run(c, q), attend(c, exactly(q)).out);
}

K3_EVERY_ISA(Mla);

}  // namespace
}  // namespace k3::gate
