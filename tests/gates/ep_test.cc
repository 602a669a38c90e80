// Whole models over expert-parallel ranks: the logits of a sequence are the single rank's, bit for
// bit, whatever the other ranks do meanwhile. Each rank is a thread that steps by itself and pads.
#include <atomic>
#include <filesystem>
#include <thread>

#include "checkpoint/synth.h"
#include "gates/model_fixture.h"
#include "moe/ep_group.h"

namespace k3::gates {
namespace {

// One sequence of a rank's script: `tokens`, fed `chunk` at a time from the rank's step `joins` on.
struct Sequence {
  std::vector<int32_t> tokens;
  int64_t chunk = 1;
  int joins = 0;
  std::vector<float> got{};
  int64_t at = 0;
};

constexpr int kSlots = 4;

class Ranks {
 public:
  Ranks(const std::string& dir, int64_t world, Numerics numerics, double timeout = 60) {
    config_ = *load_model_config(dir);
    CpuExecutorOptions o = options(numerics, 1);
    o.num_slots = kSlots;
    o.max_rows = o.max_logit_rows = 160;
    o.num_pages = 16;
    const SlabShape shape{world, o.max_rows, config_.num_experts_per_token,
                          config_.routed_expert_hidden_size};
    group_ = std::move(ThreadGroup::create(shape, timeout).value());
    o.ep = group_.get();
    for (int64_t r = 0; r < world; ++r) {
      auto checkpoint = Checkpoint::open(dir, config_, {world, r});
      EXPECT_TRUE(checkpoint.ok()) << checkpoint.status().message();
      auto e = CpuExecutor::create(std::move(*checkpoint), config_, {world, r}, o);
      EXPECT_TRUE(e.ok()) << e.status().message();
      executors_.push_back(std::move(*e));
    }
  }

  // scripts[rank]: its sequences, at most kSlots. Returns when all are fed.
  void run(std::vector<std::vector<Sequence>>* scripts) {
    std::atomic<size_t> done{0};
    std::vector<std::thread> threads;
    for (size_t r = 0; r < executors_.size(); ++r) {
      threads.emplace_back([&, r] {
        follow_script(*executors_[r], &(*scripts)[r]);
        ++done;
        while (done.load() < executors_.size()) {
          if (!executors_[r]->peers()->waiting()) {
            std::this_thread::yield();
            continue;
          }
          StepResult nothing;
          const Status s = executors_[r]->step({}, &nothing);
          EXPECT_TRUE(s.ok()) << s.message();
          ++padded_;
        }
      });
    }
    for (std::thread& t : threads) t.join();
  }

  int64_t padded() const { return padded_.load(); }
  CpuExecutor& executor(size_t rank) { return *executors_[rank]; }
  EpGroup& group() { return *group_; }

 private:
  static void follow_script(Executor& e, std::vector<Sequence>* script) {
    for (int step = 0;; ++step) {
      StepBatch batch;
      std::vector<Sequence*> who;
      bool more = false;
      std::vector<std::vector<int32_t>> pages;
      for (int slot = 0; slot < static_cast<int>(script->size()); ++slot) {
        pages.push_back(iota_pages(160, slot * 3));
      }
      for (size_t s = 0; s < script->size(); ++s) {
        Sequence& q = (*script)[s];
        const auto left = static_cast<int64_t>(q.tokens.size()) - q.at;
        more = more || left > 0;
        if (left == 0 || q.joins > step) continue;
        const auto n = static_cast<size_t>(std::min(left, q.chunk));
        batch.segments.push_back(
            {static_cast<int>(s), q.at, {q.tokens.data() + q.at, n}, pages[s], Logits::kAll});
        who.push_back(&q);
      }
      if (!more) return;
      StepResult result;
      const Status status = e.step(batch, &result);
      EXPECT_TRUE(status.ok()) << status.message();
      if (!status.ok()) return;
      int64_t row = 0;
      for (size_t i = 0; i < who.size(); ++i) {
        const size_t n = batch.segments[i].tokens.size();
        for (size_t t = 0; t < n; ++t, ++row) {
          const auto logits = result.row(row);
          who[i]->got.insert(who[i]->got.end(), logits.begin(), logits.end());
        }
        who[i]->at += static_cast<int64_t>(n);
      }
    }
  }

  ModelConfig config_;
  std::unique_ptr<ThreadGroup> group_;
  std::vector<std::unique_ptr<CpuExecutor>> executors_;
  std::atomic<int64_t> padded_{0};
};

struct Case {
  std::string name;
  Numerics numerics;
  int64_t world;
};

class Ep : public ::testing::TestWithParam<Case> {
 protected:
  // A synthetic model of 14 layers beside k3-nano's 13, written once.
  static const std::string& synthetic() {
    static const std::string dir = [] {
      const std::string path = std::string(K3_BINARY_DIR) + "/ep_synth_" + std::to_string(getpid());
      std::filesystem::remove_all(path);
      SynthOptions o;
      o.config = *synth_preset("tiny", 14, 16);
      const Status s = write_synthetic(o, path);
      EXPECT_TRUE(s.ok()) << s.message();
      return path;
    }();
    return dir;
  }
  static void TearDownTestSuite() { std::filesystem::remove_all(synthetic()); }

  std::string dir() const { return GetParam().name == "nano" ? kNano : synthetic(); }

  void expect_lonely_bits(const std::vector<std::vector<Sequence>>& scripts) {
    const Model m = Model::open(dir());
    const auto alone = m.executor(options(GetParam().numerics));
    int64_t compared = 0;
    for (size_t r = 0; r < scripts.size(); ++r) {
      for (size_t s = 0; s < scripts[r].size(); ++s) {
        const Sequence& q = scripts[r][s];
        EXPECT_TRUE(same_bits(q.got, feed(*alone, q.tokens, 160)))
            << "rank " << r << " sequence " << s;
        compared += q.at;
      }
    }
    EXPECT_GT(compared, 0);
  }

  std::vector<int32_t> ids(int64_t count, uint32_t seed) {
    return random_ids(count, seed, 264);  // both vocabularies hold these
  }
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const int64_t world : {1, 2, 4, 8}) {
    all.push_back({"nano", Numerics::kF32, world});
    all.push_back({"synth", Numerics::kBf16, world});
  }
  all.push_back({"nano", Numerics::kBf16, 4});
  all.push_back({"synth", Numerics::kF32, 4});
  return all;
}
INSTANTIATE_TEST_SUITE_P(Worlds, Ep, ::testing::ValuesIn(cases()), [](const auto& param) {
  return param.param.name + "_" + numerics_name(param.param.numerics) + "_" +
         std::to_string(param.param.world);
});

TEST_P(Ep, IdlePeersPadAndChangeNothing) {
  const int64_t world = GetParam().world;
  for (const int64_t busy : {int64_t{0}, world - 1}) {
    Ranks ranks(dir(), world, GetParam().numerics);
    std::vector<std::vector<Sequence>> scripts(static_cast<size_t>(world));
    scripts[static_cast<size_t>(busy)] = {{ids(67, 1), 50}, {ids(9, 2), 1, 1}};
    ranks.run(&scripts);
    expect_lonely_bits(scripts);
    // Every step of the busy rank was one padding step of each other.
    EXPECT_EQ(ranks.padded(), (world - 1) * 10);
  }
}

TEST_P(Ep, BusyPeersOfUnevenLengthsChangeNothing) {
  const int64_t world = GetParam().world;
  Ranks ranks(dir(), world, GetParam().numerics);
  std::vector<std::vector<Sequence>> scripts(static_cast<size_t>(world));
  for (int64_t r = 0; r < world; ++r) {
    for (int64_t s = 0; s < 1 + r % 3; ++s) {
      scripts[static_cast<size_t>(r)].push_back({ids(5 + 17 * r % 40 + 11 * s, 10 + r * 3 + s),
                                                 1 + (r * 5 + s * 7) % 16,
                                                 static_cast<int>(s * 2)});
    }
  }
  ranks.run(&scripts);
  expect_lonely_bits(scripts);
}

TEST_P(Ep, PrefillOnOneRankAgainstDecodeOnAnotherChangesNothing) {
  const int64_t world = GetParam().world;
  Ranks ranks(dir(), world, GetParam().numerics);
  std::vector<std::vector<Sequence>> scripts(static_cast<size_t>(world));
  scripts[0] = {{ids(24, 40), 1}, {ids(20, 41), 1}};
  scripts[static_cast<size_t>(world - 1)].push_back({ids(150, 42), 64, 2});
  ranks.run(&scripts);
  expect_lonely_bits(scripts);
}

// What another rank computes is nobody's business: the same script among other traffic.
TEST_P(Ep, ARequestsBitsDoNotDependOnTheTraffic) {
  const int64_t world = GetParam().world;
  std::vector<float> first;
  for (int traffic = 0; traffic < 3; ++traffic) {
    Ranks ranks(dir(), world, GetParam().numerics);
    std::vector<std::vector<Sequence>> scripts(static_cast<size_t>(world));
    scripts[0] = {{ids(40, 50), 7}};
    for (int64_t r = 1; r < world; ++r) {
      if (traffic > 0) {
        scripts[static_cast<size_t>(r)] = {
            {ids(20 + 30 * traffic, static_cast<uint32_t>(60 + r + traffic)), 9 * traffic,
             traffic}};
      }
    }
    ranks.run(&scripts);
    if (traffic == 0) first = scripts[0][0].got;
    EXPECT_TRUE(same_bits(scripts[0][0].got, first)) << "traffic " << traffic;
  }
}

// A rank that has no step left out of its script, but makes one call less: nobody hangs, and all
// are told the same.
TEST(EpFaults, ARankThatStopsPaddingEndsTheGroupForAll) {
  Ranks ranks(kNano, 2, Numerics::kF32, 0.3);
  const auto ids = random_ids(20, 70, 264);
  const auto pages = iota_pages(64);
  StepResult result;
  const auto start = std::chrono::steady_clock::now();
  const Status s = ranks.executor(0).step({{{0, 0, ids, pages, Logits::kLast}}}, &result);
  EXPECT_EQ(s.code(), ErrorCode::kRankLost);
  EXPECT_NE(s.message().find("rank 0, layer 1, call 1: no dispatch from rank 1"), std::string::npos)
      << s.message();
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
  EXPECT_TRUE(ranks.executor(1).peers()->waiting());
  EXPECT_EQ(ranks.executor(1).step({}, &result).message(), s.message());
}

// A refusal comes before the first call: the group does not notice.
TEST(EpFaults, ARefusedStepMakesNoCall) {
  Ranks ranks(kNano, 2, Numerics::kF32, 30);
  const std::vector<int32_t> bad = {5000};
  const auto pages = iota_pages(64);
  StepResult result;
  EXPECT_EQ(ranks.executor(0).step({{{0, 0, bad, pages, Logits::kLast}}}, &result).code(),
            ErrorCode::kInvalidArgument);
  EXPECT_FALSE(ranks.executor(1).peers()->waiting());
  std::vector<std::vector<Sequence>> scripts(2);
  scripts[0] = {{random_ids(12, 71, 264), 5}};
  ranks.run(&scripts);
  const Model m = Model::open(kNano);
  EXPECT_TRUE(same_bits(scripts[0][0].got, feed(*m.executor(options()), scripts[0][0].tokens, 12)));
}

}  // namespace
}  // namespace k3::gates
