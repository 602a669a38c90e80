// One MoE call of one rank as a sequence of actions, each of which either may go ahead now or waits
// for one peer. The order below is the whole argument why one slab per rank is enough (docs/ep.md):
//   * section [r] of p's inbox is written again only after p's return of the call before, which p
//     publishes when it has read the inbox;
//   * p writes into r's `returned` again only after r's next dispatch, which r publishes when it
//   has
//     combined.
// The class holds no memory and no atomics: a Port supplies them. The executor's port is in
// cpu/ep_moe.cc, the port of tests/moe/ explores every interleaving.
//
// Port: write_dispatch(peer), publish_dispatch(peer, gen), dispatch_seen(peer) -> gen,
//       compute(), write_return(peer), publish_return(peer, gen), return_seen(peer) -> gen,
//       combine().
#pragma once

#include <cstdint>

namespace k3 {

enum class EpPhase {
  kWriteDispatch,
  kPublishDispatch,
  kAwaitDispatch,
  kCompute,
  kWriteReturn,
  kPublishReturn,
  kAwaitReturn,
  kCombine,
  kDone
};

inline const char* ep_phase_name(EpPhase phase) {
  switch (phase) {
    case EpPhase::kAwaitDispatch:
      return "dispatch";
    case EpPhase::kAwaitReturn:
      return "return";
    default:
      return "compute";
  }
}

template <typename Port>
class CallProtocol {
 public:
  // Call number `generation` (1, 2, ...) of `rank`.
  CallProtocol(int64_t world, int64_t rank, uint64_t generation)
      : world_(world), rank_(rank), generation_(generation) {
    if (world == 1) phase_ = EpPhase::kCompute;
  }

  bool done() const { return phase_ == EpPhase::kDone; }
  EpPhase phase() const { return phase_; }
  // The peer that the next action concerns, nearest first so that ranks do not all start on rank 0.
  int64_t peer() const { return (rank_ + 1 + index_) % world_; }

  bool ready(const Port& port) const {
    if (phase_ == EpPhase::kAwaitDispatch) return port.dispatch_seen(peer()) >= generation_;
    if (phase_ == EpPhase::kAwaitReturn) return port.return_seen(peer()) >= generation_;
    return true;
  }

  // Does the next action, which must be ready.
  void advance(Port& port) {
    switch (phase_) {
      case EpPhase::kWriteDispatch:
        port.write_dispatch(peer());
        phase_ = EpPhase::kPublishDispatch;
        return;
      case EpPhase::kPublishDispatch:
        port.publish_dispatch(peer(), generation_);
        next_peer(EpPhase::kWriteDispatch, EpPhase::kAwaitDispatch);
        return;
      case EpPhase::kAwaitDispatch:
        next_peer(EpPhase::kAwaitDispatch, EpPhase::kCompute);
        return;
      case EpPhase::kCompute:
        port.compute();
        phase_ = world_ == 1 ? EpPhase::kCombine : EpPhase::kWriteReturn;
        return;
      case EpPhase::kWriteReturn:
        port.write_return(peer());
        phase_ = EpPhase::kPublishReturn;
        return;
      case EpPhase::kPublishReturn:
        port.publish_return(peer(), generation_);
        next_peer(EpPhase::kWriteReturn, EpPhase::kAwaitReturn);
        return;
      case EpPhase::kAwaitReturn:
        next_peer(EpPhase::kAwaitReturn, EpPhase::kCombine);
        return;
      case EpPhase::kCombine:
        port.combine();
        phase_ = EpPhase::kDone;
        return;
      case EpPhase::kDone:
        return;
    }
  }

 private:
  void next_peer(EpPhase again, EpPhase after) {
    index_ = index_ + 1 < world_ - 1 ? index_ + 1 : 0;
    phase_ = index_ == 0 ? after : again;
  }

  int64_t world_, rank_;
  uint64_t generation_;
  EpPhase phase_ = EpPhase::kWriteDispatch;
  int64_t index_ = 0;
};

}  // namespace k3
