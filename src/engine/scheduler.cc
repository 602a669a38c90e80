#include "engine/scheduler.h"

#include <algorithm>
#include <cassert>

namespace k3 {

Scheduler::Scheduler(int64_t max_num_seqs, int64_t max_rows, int64_t num_slots, int64_t num_pages)
    : max_num_seqs_(max_num_seqs), max_rows_(max_rows), slots_(num_slots), pages_(num_pages) {
  assert(max_num_seqs <= max_rows);
}

void Scheduler::enqueue(RequestState* request) { waiting_.push_back(request); }

void Scheduler::admit() {
  while (!waiting_.empty() && num_running() < max_num_seqs_ && slots_.num_free() > 0) {
    RequestState* head = waiting_.front();
    if (!pages_.take(pages_for(head->max_total_tokens()), &head->pages)) return;
    std::vector<int32_t> slot;
    slots_.take(1, &slot);
    head->slot = slot[0];
    head->phase = Phase::kPrefill;
    waiting_.pop_front();
    running_.push_back(head);
    turns_.push_back(head);
  }
}

void Scheduler::deal_prefill(int64_t rows) {
  while (rows > 0 && !turns_.empty()) {
    RequestState* r = turns_.front();
    const int64_t done = r->num_computed + r->num_granted;
    const int64_t turn =
        std::min({kPageTokens - done % kPageTokens, r->prompt_size() - done, rows});
    r->num_granted += turn;
    rows -= turn;
    if (done + turn == r->prompt_size()) {
      turns_.pop_front();
    } else if ((done + turn) % kPageTokens == 0) {
      turns_.pop_front();
      turns_.push_back(r);
    }  // else the rows ran out inside its turn, which it finishes first in the next step
  }
}

std::vector<PlannedSegment> Scheduler::plan() {
  std::vector<PlannedSegment> plan;
  for (RequestState* r : running_) {
    r->num_granted = 0;
    if (r->phase == Phase::kDecode) plan.push_back({r, 1, Logits::kLast});
  }
  deal_prefill(max_rows_ - static_cast<int64_t>(plan.size()));
  for (RequestState* r : running_) {
    if (r->num_granted == 0) continue;
    const bool last = r->num_computed + r->num_granted == r->prompt_size();
    plan.push_back({r, r->num_granted, last ? Logits::kLast : Logits::kNone});
  }
  return plan;
}

void Scheduler::remove(RequestState* request) {
  if (request->phase == Phase::kWaiting) {
    std::erase(waiting_, request);
    return;
  }
  std::erase(running_, request);
  std::erase(turns_, request);
  slots_.give_back({&request->slot, 1});
  pages_.give_back(request->pages);
  request->slot = -1;
  request->pages.clear();
}

}  // namespace k3
