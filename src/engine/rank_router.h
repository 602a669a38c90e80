// Requests over ranks: each request goes to the least loaded of them or to the one it is pinned to.
// No rank knows of another's requests.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "engine/front_end.h"

namespace k3 {

class RankRouter : public FrontEnd {
 public:
  // At least one rank, in order: an EngineLoop in this process or a RemoteRank.
  explicit RankRouter(std::vector<std::unique_ptr<FrontEnd>> ranks);
  // Drains every rank before the first stops: as long as one steps, all must.
  ~RankRouter() override;

  // kInvalidArgument for Request::rank outside the group.
  Status validate(const Request& request) const override;
  Result<RequestId> submit(Request request) override;
  void cancel(RequestId id) override;
  EngineStats stats() const override;             // sums
  const EngineOptions& options() const override;  // one rank's
  int64_t max_open() const override;              // sums
  bool drain(double seconds) override;
  Status health() const override;  // the first rank's that is not ok

  EngineStats rank_stats(int rank) const { return ranks_[static_cast<size_t>(rank)]->stats(); }

 private:
  int64_t size() const { return static_cast<int64_t>(ranks_.size()); }
  std::vector<std::unique_ptr<FrontEnd>> ranks_;
  std::mutex choice_;  // one choice at a time, so that two requests do not see the same idle rank
  size_t next_ = 0;    // ties go round
};

}  // namespace k3
