// The MegaMoE contract over N ranks (docs/ep.md): live rows travel to the ranks that own a chosen
// expert, expert outputs travel back, the row's owner combines them in slot order. Bit for bit the
// result of LocalMoe, whatever the other ranks do.
#pragma once

#include <memory>
#include <vector>

#include "cpu/local_moe.h"
#include "moe/call_protocol.h"
#include "moe/ep_group.h"
#include "moe/topology.h"

namespace k3 {

class EpMoe : public MegaMoe {
 public:
  // `weights` as bound for `rank` of the group. kInvalidArgument if the group's shape is not the
  // model's.
  static Result<std::unique_ptr<EpMoe>> create(const ModelWeights* weights, ThreadPool* pool,
                                               const Kernels* kernels, NumericsPolicy policy,
                                               EpGroup* group, int64_t rank);

  // Every rank makes the same calls in the same order. kRankLost, naming rank, layer and phase,
  // when a peer does not follow within the group's timeout, or when this rank or a peer makes the
  // call for another layer than its number says; the group is then lost for all.
  Status run(const MoeCall& call) override;

  // A peer has begun a call that this rank has not: it must step, with live rows or without.
  bool peer_waits() const;
  // Calls made so far.
  uint64_t calls() const { return generation_; }

 private:
  friend class CallProtocol<EpMoe>;
  EpMoe() = default;

  // The port of CallProtocol.
  void write_dispatch(int64_t peer);
  void publish_dispatch(int64_t peer, uint64_t generation);
  uint64_t dispatch_seen(int64_t peer) const;
  void compute();
  void write_return(int64_t peer);
  void publish_return(int64_t peer, uint64_t generation);
  uint64_t return_seen(int64_t peer) const;
  void combine();

  Status lose(const Status& status);

  EpGroup* group_ = nullptr;
  Topology topology_;
  const ModelWeights* weights_ = nullptr;
  ThreadPool* pool_ = nullptr;
  const Kernels* kernels_ = nullptr;
  NumericsPolicy policy_;
  std::vector<int64_t> moe_layers_;  // model layers that make a call, in order
  uint64_t generation_ = 0;          // calls made
  MoeCall call_;
  ExpertCompute experts_;
  ExpertRoutes routes_;
  std::vector<int32_t> ids_;        // top-k ids of all rows received, by rank
  std::vector<int32_t> inbox_;      // where in the slab's latents each of them lies
  std::vector<int64_t> first_;      // first row of each rank in the two above
  std::vector<int32_t> sent_back_;  // assignments of the last write_return
  Buffer<float> out_;               // [row received][top_k][latent]
};

}  // namespace k3
