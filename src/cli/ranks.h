// The ranks of a loaded model as running engines (docs/ep.md). Rank 0 leads: it has the front end,
// or the tokens; the others run what they are sent, and pad.
#pragma once

#include <memory>
#include <vector>

#include "cli/load.h"
#include "engine/engine_loop.h"
#include "engine/rank_router.h"
#include "engine/remote_rank.h"

namespace k3::cli {

// All ranks as one front end: those of this process, and under mpirun the other processes'. `m`
// outlives it.
class Ranks {
 public:
  explicit Ranks(const LoadedModel& m);
  ~Ranks();
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  RankRouter& router() { return *router_; }

 private:
  MpiGroup* mpi_;
  std::vector<RemoteRank*> remote_;
  std::unique_ptr<RankRouter> router_;
};

// The other ranks of this process, for a command that steps rank 0 itself: they pad.
std::vector<std::unique_ptr<EngineLoop>> idle_ranks(const LoadedModel& m);

// Whether this process is one of mpirun's that rank 0 leads.
bool led_by_rank_0(const LoadedModel& m);
// The whole life of such a process: runs what rank 0 sends it until rank 0 has done. mpirun passes
// its own signals to every process; when to stop is rank 0's decision.
Status follow_rank_0(const LoadedModel& m);

// Logs the end of every rank here, if the group has failed: who noticed, where, which layer.
// Ends the process with its exit code should a rank be stuck and not let go of its thread.
void report_group_failure(const LoadedModel& m, const Status& health);

}  // namespace k3::cli
