// Attention residuals: score_i = (v_i . fold) / sqrt(mean(v_i^2) + eps), softmax over snapshots and
// stream, mix of the values as they are.
#include "cpu/stage_gate.h"
#include "model/geometry.h"

namespace k3::gate {
namespace {

constexpr float kEps = 1e-5f;

enum class Twin { kNone, kMixNormed, kScoresOfRaw, kStreamFirst, kNoStream, kNoMax };

Balls mix(std::vector<std::vector<float>> candidates, const std::vector<float>& fold, bool bf16,
          Twin twin = Twin::kNone) {
  if (twin == Twin::kStreamFirst) {  // the weights of a shifted candidate order
    std::rotate(candidates.rbegin(), candidates.rbegin() + 1, candidates.rend());
  }
  const auto n = static_cast<int64_t>(fold.size());
  const Balls f = exactly(fold);
  Balls score, root;
  Ball top = exactly(-1e30);
  for (const std::vector<float>& c : candidates) {
    const Balls v = exactly(c);
    root.push_back(inverse_root(sum_of_squares(v.data(), n), static_cast<double>(n), kEps));
    const Ball raw = dot(v.data(), f.data(), n);
    score.push_back(twin == Twin::kScoresOfRaw ? raw : raw * root.back());
    if (score.back().v > top.v) top = score.back();
  }
  if (twin == Twin::kStreamFirst) {
    std::rotate(candidates.begin(), candidates.begin() + 1, candidates.end());
  }
  if (twin == Twin::kNoStream) score.back() = exactly(-1e4);
  Balls p;
  Ball sum = exactly(0);
  for (const Ball& s : score) {
    p.push_back(exp(s - top));
    sum = sum + p.back();
  }
  Balls out;
  for (size_t i = 0; i < fold.size(); ++i) {
    Ball acc = exactly(0);
    for (size_t c = 0; c < p.size(); ++c) {
      Ball v = exactly(candidates[c][i]);
      if (twin == Twin::kMixNormed) v = v * root[c];
      acc = fused(p[c] / sum, v, acc);
    }
    out.push_back(land(acc, bf16));
  }
  return out;
}

ModelConfig config(int64_t hidden, int64_t layers, int64_t block) {
  ModelConfig c;
  c.hidden_size = hidden;
  c.num_hidden_layers = layers;
  c.attn_res_block_size = block;
  return c;
}

class AttnRes : public IsaTest {
 protected:
  std::vector<float> run(const std::vector<float>& bank, const SnapshotLayout& at, int64_t row,
                         int64_t count, const float* stream, const std::vector<float>& fold,
                         bool bf16) const {
    std::vector<float> out = poisoned(at.hidden);
    AttnResArgs a;
    a.snapshots = bank.data() + at.at(0, row);
    a.snapshot_stride = at.stride();
    a.count = count;
    a.stream = stream;
    a.fold = fold.data();
    a.n = at.hidden;
    a.eps = kEps;
    a.out = out.data();
    a.bf16 = bf16;
    k().attn_res(a);
    return out;
  }
};

std::vector<float> slice(const std::vector<float>& x, int64_t at, int64_t n) {
  return {x.begin() + at, x.begin() + at + n};
}

TEST_P(AttnRes, IsTheEquationForOneToNineCandidatesInEveryRow) {
  Random random(21);
  for (const bool bf16 : {false, true}) {
    for (const int64_t hidden : {7, 48, 65}) {
      for (int64_t count = 0; count <= 8; ++count) {
        const int64_t rows = 3;
        const SnapshotLayout at(config(hidden, 8, 1), 5);  // room for more rows than are live
        std::vector<float> bank = poisoned(at.size());
        std::vector<float> stream = random.normals(rows * hidden, 2, bf16);
        // fold in the release is norm * proj, of a size that makes the softmax neither flat nor one
        const std::vector<float> fold = random.normals(hidden, 1.0 / std::sqrt(hidden));
        for (int64_t s = 0; s < count; ++s) {
          for (int64_t row = 0; row < rows; ++row) {
            const std::vector<float> v = random.normals(hidden, 1 + s, bf16);
            std::copy(v.begin(), v.end(), bank.begin() + at.at(s, row));
          }
        }
        for (int64_t row = 0; row < rows; ++row) {
          std::vector<std::vector<float>> candidates;
          for (int64_t s = 0; s < count; ++s)
            candidates.push_back(slice(bank, at.at(s, row), hidden));
          candidates.push_back(slice(stream, row * hidden, hidden));
          const Balls want = mix(candidates, fold, bf16);
          EXPECT_WITHIN(run(bank, at, row, count, stream.data() + row * hidden, fold, bf16), want)
              << hidden << " " << count << " " << row;
          if (count < 2) continue;
          for (const Twin twin :
               {Twin::kMixNormed, Twin::kScoresOfRaw, Twin::kStreamFirst, Twin::kNoStream}) {
            EXPECT_TRIPS(mix(candidates, fold, bf16, twin), want) << static_cast<int>(twin);
          }
          // Another row's snapshots: what a stride that follows the live rows would read.
          if (row == 0) continue;
          const SnapshotLayout dense(config(hidden, 8, 1), rows);
          EXPECT_TRIPS(run(bank, dense, row, count, stream.data() + row * hidden, fold, bf16),
                       want);
        }
      }
    }
  }
}

TEST_P(AttnRes, AloneTheStreamComesBackAsItIs) {
  Random random(22);
  const SnapshotLayout at(config(50, 1, 1), 1);
  const std::vector<float> stream = random.normals(50), fold = random.normals(50);
  EXPECT_SAME_BITS(run(poisoned(at.size()), at, 0, 0, stream.data(), fold, false), stream);
}

TEST_P(AttnRes, ScoresFarApartNeitherOverflowNorVanish) {
  Random random(23);
  const int64_t hidden = 64;
  const SnapshotLayout at(config(hidden, 2, 1), 1);
  std::vector<float> bank = random.normals(at.size()), fold = random.normals(hidden, 60);
  const std::vector<float> stream = random.normals(hidden);
  EXPECT_WITHIN(
      run(bank, at, 0, 2, stream.data(), fold, false),
      mix({slice(bank, 0, hidden), slice(bank, at.at(1, 0), hidden), stream}, fold, false));
}

// The walk of the layers (spec 3.1) in float64 and with the kernels: mix with the old bank, bank
// the raw stream at a block's first layer, replace it there by the layer's output, mix again, add.
// What a layer would compute is a fixed linear map of the mix, so that a wrong mix reaches
// everything after. Thirteen layers of blocks of three: five snapshots.
enum class WalkTwin { kNone, kBankMixed, kAddAtBoundary, kBankAfterAttention, kNewBankInFirstMix };

struct Walk {
  int64_t hidden = 40, layers = 13, block = 3;
  std::vector<float> embedding, attention, mlp, fold;  // per-channel maps; folds [2 layers + 1]

  std::vector<float> fold_of(int64_t i) const { return slice(fold, i * hidden, hidden); }

  std::vector<double> reference(WalkTwin twin) const {
    std::vector<std::vector<double>> bank;
    std::vector<double> p(embedding.begin(), embedding.end());
    const auto mixed = [&](int64_t which, size_t count) {
      std::vector<std::vector<double>> candidates(bank.begin(),
                                                  bank.begin() + static_cast<int64_t>(count));
      candidates.push_back(p);
      std::vector<double> e, out(p.size());
      double sum = 0;
      for (const auto& v : candidates) {
        double square = 0, score = 0;
        for (size_t i = 0; i < v.size(); ++i) {
          square += v[i] * v[i];
          score += v[i] * fold[static_cast<size_t>(which * hidden) + i];
        }
        e.push_back(std::exp(score / std::sqrt(square / static_cast<double>(hidden) + kEps)));
        sum += e.back();
      }
      for (size_t c = 0; c < e.size(); ++c) {
        for (size_t i = 0; i < out.size(); ++i) out[i] += e[c] / sum * candidates[c][i];
      }
      return out;
    };
    for (int64_t layer = 0; layer < layers; ++layer) {
      const bool first = layer % block == 0;
      if (first && twin == WalkTwin::kNewBankInFirstMix) bank.push_back(p);
      const std::vector<double> m = mixed(2 * layer, bank.size());
      if (first && twin != WalkTwin::kNewBankInFirstMix && twin != WalkTwin::kBankAfterAttention) {
        bank.push_back(twin == WalkTwin::kBankMixed ? m : p);
      }
      for (size_t i = 0; i < p.size(); ++i) {
        const double a = attention[i] * m[i];
        p[i] = first && twin != WalkTwin::kAddAtBoundary ? a : p[i] + a;
      }
      if (first && twin == WalkTwin::kBankAfterAttention) bank.push_back(p);
      const std::vector<double> m2 = mixed(2 * layer + 1, bank.size());
      for (size_t i = 0; i < p.size(); ++i) p[i] += mlp[i] * m2[i];
    }
    return mixed(2 * layers, bank.size());
  }
};

TEST_P(AttnRes, WalksThirteenLayersOfThreeRowsLikeTheEquations) {
  Random random(24);
  const int64_t rows = 3;
  Walk walk;
  const int64_t h = walk.hidden;
  walk.attention = random.normals(h);
  walk.mlp = random.normals(h);
  walk.fold = random.normals((2 * walk.layers + 1) * h, 0.3);
  const SnapshotLayout at(config(h, walk.layers, walk.block), rows);
  ASSERT_EQ(at.snapshots, 5);
  std::vector<float> bank = poisoned(at.size()), stream = random.normals(rows * h);
  const std::vector<float> embedding = stream;
  std::vector<float> last;
  for (int64_t row = 0; row < rows; ++row) {
    float* p = stream.data() + row * h;
    for (int64_t layer = 0; layer < walk.layers; ++layer) {
      const bool first = layer % walk.block == 0;
      const int64_t before = (layer + walk.block - 1) / walk.block;
      std::vector<float> m = run(bank, at, row, before, p, walk.fold_of(2 * layer), false);
      if (first) std::copy(p, p + h, bank.begin() + at.at(before, row));
      for (int64_t i = 0; i < h; ++i)
        m[static_cast<size_t>(i)] *= walk.attention[static_cast<size_t>(i)];
      if (first) {
        std::copy(m.begin(), m.end(), p);
      } else {
        k().add(p, m.data(), p, h, false);
      }
      std::vector<float> m2 =
          run(bank, at, row, layer / walk.block + 1, p, walk.fold_of(2 * layer + 1), false);
      for (int64_t i = 0; i < h; ++i)
        m2[static_cast<size_t>(i)] *= walk.mlp[static_cast<size_t>(i)];
      k().add(p, m2.data(), p, h, false);
    }
    last = run(bank, at, row, at.snapshots, p, walk.fold_of(2 * walk.layers), false);

    walk.embedding = slice(embedding, row * h, h);
    // Each of the 27 mixes loses at most a few tens of roundings of its largest candidate, and
    // passes on what it got times |attention| + |mlp| and the softmax's slope; 1e-4 of the largest
    // value is far above that and far below what any wrong bank does.
    const std::vector<double> want = walk.reference(WalkTwin::kNone);
    double largest = 0;
    for (const double v : want) largest = std::max(largest, std::abs(v));
    const auto around = [&](const std::vector<double>& x) {
      Balls b;
      for (const double v : x) b.push_back({v, 1e-4 * largest});
      return b;
    };
    EXPECT_WITHIN(last, around(want)) << row;
    for (const WalkTwin twin : {WalkTwin::kBankMixed, WalkTwin::kAddAtBoundary,
                                WalkTwin::kBankAfterAttention, WalkTwin::kNewBankInFirstMix}) {
      EXPECT_TRIPS(around(walk.reference(twin)), around(want)) << static_cast<int>(twin);
    }
  }
}

K3_EVERY_ISA(AttnRes);

}  // namespace
}  // namespace k3::gate
