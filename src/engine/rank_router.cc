#include "engine/rank_router.h"

#include <chrono>
#include <utility>

namespace k3 {

RankRouter::RankRouter(std::vector<std::unique_ptr<FrontEnd>> ranks) : ranks_(std::move(ranks)) {}

RankRouter::~RankRouter() { RankRouter::drain(0); }

Status RankRouter::validate(const Request& request) const {
  if (request.rank < -1 || request.rank >= size()) {
    return invalid_argument("rank: found ", request.rank, ", expected 0 to ", size() - 1);
  }
  return ranks_[request.rank < 0 ? 0 : static_cast<size_t>(request.rank)]->validate(request);
}

// Ids: rank r numbers its n-th request n; here it is n * size + r.
Result<RequestId> RankRouter::submit(Request request) {
  K3_RETURN_IF_ERROR(validate(request));
  std::lock_guard lock(choice_);
  auto rank = static_cast<size_t>(request.rank);
  if (request.rank < 0) {
    int64_t least = -1;
    for (size_t i = 0; i < ranks_.size(); ++i) {
      const size_t r = (next_ + i) % ranks_.size();
      const EngineStats s = ranks_[r]->stats();
      if (least >= 0 && s.running + s.waiting >= least) continue;
      least = s.running + s.waiting;
      rank = r;
    }
    next_ = (rank + 1) % ranks_.size();
  }
  K3_ASSIGN_OR_RETURN(const RequestId id, ranks_[rank]->submit(std::move(request)));
  return id * static_cast<RequestId>(size()) + rank;
}

void RankRouter::cancel(RequestId id) {
  const auto n = static_cast<RequestId>(size());
  ranks_[id % n]->cancel(id / n);
}

EngineStats RankRouter::stats() const {
  EngineStats sum;
  for (const auto& rank : ranks_) {
    const EngineStats s = rank->stats();
    sum.running += s.running;
    sum.waiting += s.waiting;
    sum.slots_free += s.slots_free;
    sum.pages_free += s.pages_free;
    sum.pages_total += s.pages_total;
    sum.steps += s.steps;
    sum.prompt_tokens += s.prompt_tokens;
    sum.generated_tokens += s.generated_tokens;
    sum.finished_stop += s.finished_stop;
    sum.finished_length += s.finished_length;
    sum.finished_cancelled += s.finished_cancelled;
    sum.finished_error += s.finished_error;
  }
  return sum;
}

const EngineOptions& RankRouter::options() const { return ranks_.front()->options(); }

int64_t RankRouter::max_open() const { return options().max_open() * size(); }

bool RankRouter::drain(double seconds) {
  const auto start = std::chrono::steady_clock::now();
  bool clean = true;
  for (const auto& rank : ranks_) {
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start;
    clean = rank->drain(seconds - spent.count()) && clean;
  }
  return clean;
}

Status RankRouter::health() const {
  for (const auto& rank : ranks_) K3_RETURN_IF_ERROR(rank->health());
  return {};
}

}  // namespace k3
