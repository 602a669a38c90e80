// Every interleaving of the real call protocol (moe/call_protocol.h) at small size, sequentially
// consistent: the slab section a rank writes is never one that is still to be read, what it reads
// is of its own generation, and no schedule ends in a deadlock. What memory ordering adds is TSan's
// part.
#include "moe/call_protocol.h"

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

namespace k3 {
namespace {

enum class Mutant { kNone, kNoWaitForDispatch, kNoWaitForReturn, kRankLeavesOutACall };

constexpr int kMaxWorld = 3;
using Table = uint64_t[kMaxWorld][kMaxWorld];  // [at rank][from rank]: generation

struct Memory {
  Table inbox{}, inbox_done{}, returned{};
  Table dispatched{}, return_flag{};
  uint64_t combined[kMaxWorld]{};
};

struct ModelPort {
  int64_t world, rank;
  uint64_t generation;
  Mutant mutant;
  Memory* m;
  std::string* violation;

  void check(bool ok, const char* what) const {
    if (!ok && violation->empty()) *violation = what;
  }
  void write_dispatch(int64_t p) {
    check(m->inbox_done[p][rank] == m->inbox[p][rank], "inbox overwritten before it was read");
    m->inbox[p][rank] = generation;
  }
  void publish_dispatch(int64_t p, uint64_t g) { m->dispatched[p][rank] = g; }
  uint64_t dispatch_seen(int64_t p) const {
    return mutant == Mutant::kNoWaitForDispatch ? ~0ull : m->dispatched[rank][p];
  }
  void compute() {
    for (int64_t p = 0; p < world; ++p) {
      if (p != rank) check(m->inbox[rank][p] == generation, "computed on another call's rows");
    }
  }
  void write_return(int64_t p) {
    check(m->inbox[rank][p] == generation, "returned to another call's rows");
    m->inbox_done[rank][p] = generation;
    check(m->combined[p] == generation - 1, "returned over outputs not yet combined");
    m->returned[p][rank] = generation;
  }
  void publish_return(int64_t p, uint64_t g) { m->return_flag[p][rank] = g; }
  uint64_t return_seen(int64_t p) const {
    return mutant == Mutant::kNoWaitForReturn ? ~0ull : m->return_flag[rank][p];
  }
  void combine() {
    for (int64_t p = 0; p < world; ++p) {
      if (p != rank) check(m->returned[rank][p] == generation, "combined another call's outputs");
    }
    m->combined[rank] = generation;
  }
};

struct Outcome {
  std::string violation;
  size_t states = 0;
};

// Depth first over all schedules. What memory holds follows from how far each rank has come, so a
// state is the tuple of program counters.
class Explorer {
 public:
  Explorer(int64_t world, uint64_t calls, Mutant mutant)
      : world_(world), calls_(calls), mutant_(mutant) {}

  Outcome run() {
    State s;
    for (int64_t r = 0; r < world_; ++r)
      s.ranks.push_back({CallProtocol<ModelPort>(world_, r, 1), 1, 0});
    visit(s);
    return outcome_;
  }

 private:
  struct Rank {
    CallProtocol<ModelPort> call;
    uint64_t generation;
    int pc;
  };
  struct State {
    std::vector<Rank> ranks;
    Memory memory;
  };

  uint64_t last_call(int64_t rank) const {
    return mutant_ == Mutant::kRankLeavesOutACall && rank == world_ - 1 ? calls_ - 1 : calls_;
  }

  void visit(const State& s) {
    if (!outcome_.violation.empty()) return;
    std::vector<int> key;
    for (const Rank& r : s.ranks) key.push_back(r.pc);
    if (!seen_.insert(key).second) return;
    ++outcome_.states;
    bool moved = false, all_done = true;
    for (int64_t r = 0; r < world_; ++r) {
      if (s.ranks[static_cast<size_t>(r)].generation > last_call(r)) continue;
      all_done = false;
      State next = s;
      Rank& rank = next.ranks[static_cast<size_t>(r)];
      ModelPort port{world_, r, rank.generation, mutant_, &next.memory, &outcome_.violation};
      if (!rank.call.ready(port)) continue;
      moved = true;
      rank.call.advance(port);
      ++rank.pc;
      if (rank.call.done()) {
        ++rank.generation;
        rank.call = CallProtocol<ModelPort>(world_, r, rank.generation);
      }
      visit(next);
    }
    if (!moved && !all_done && outcome_.violation.empty()) outcome_.violation = "deadlock";
  }

  int64_t world_;
  uint64_t calls_;
  Mutant mutant_;
  std::set<std::vector<int>> seen_;
  Outcome outcome_;
};

TEST(CallProtocol, NoInterleavingReusesASlabTooEarlyOrDeadlocks) {
  for (const auto& [world, calls] : {std::pair{1, 3}, {2, 4}, {3, 3}}) {
    const Outcome o = Explorer(world, static_cast<uint64_t>(calls), Mutant::kNone).run();
    EXPECT_EQ(o.violation, "") << world << " ranks";
    EXPECT_GT(o.states, static_cast<size_t>(world * world)) << world << " ranks";
  }
}

TEST(CallProtocol, ARankThatDoesNotWaitIsCaught) {
  EXPECT_NE(Explorer(2, 3, Mutant::kNoWaitForDispatch).run().violation, "");
  EXPECT_NE(Explorer(2, 3, Mutant::kNoWaitForReturn).run().violation, "");
}

TEST(CallProtocol, ADroppedPaddingCallStopsTheGroup) {
  EXPECT_EQ(Explorer(2, 3, Mutant::kRankLeavesOutACall).run().violation, "deadlock");
}

}  // namespace
}  // namespace k3
