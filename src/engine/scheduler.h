// Who gets a slot, and who gets the rows of the next step. Decisions only: the engine executes
// them.
//
// Admission: first come, first served. A request enters when a sequence, a slot and every page of
// its lifetime (prompt + max_tokens) are free; the head of the queue waits for that and nobody
// overtakes it, so a big request is not starved by small ones, and an admitted one never runs out
// of pages.
//
// Rows: one for every decoding request, always. What is left is dealt to the prefilling requests in
// turns of one page (kPageTokens tokens, ending on a page boundary or at the prompt's end); the
// turn order carries over from step to step and a new request joins at its end. So with n requests
// prefilling, a prompt of P tokens is done after n * ceil(P / kPageTokens) turns at most, whatever
// the length of the other prompts.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "engine/page_pool.h"
#include "engine/request_state.h"
#include "executor/executor.h"

namespace k3 {

struct PlannedSegment {
  RequestState* request = nullptr;
  int64_t num_tokens = 0;  // from request->num_computed on
  Logits logits = Logits::kNone;
};

class Scheduler {
 public:
  // max_num_seqs <= max_rows, so that a row is left for prefill whenever a request is prefilling.
  Scheduler(int64_t max_num_seqs, int64_t max_rows, int64_t num_slots, int64_t num_pages);

  // Requests are not owned; each stays here from enqueue to remove.
  void enqueue(RequestState* request);
  void admit();
  // The next step: decode rows first, then prefill chunks, each group in order of admission. Empty
  // when nothing runs. The turns it deals are spent: run the plan before asking for another.
  std::vector<PlannedSegment> plan();
  // From whichever stage it is in; slot and pages are free at once.
  void remove(RequestState* request);

  int64_t num_waiting() const { return static_cast<int64_t>(waiting_.size()); }
  int64_t num_running() const { return static_cast<int64_t>(running_.size()); }
  const IdPool& slots() const { return slots_; }
  const IdPool& pages() const { return pages_; }

 private:
  void deal_prefill(int64_t rows);

  int64_t max_num_seqs_;
  int64_t max_rows_;
  IdPool slots_, pages_;
  std::deque<RequestState*> waiting_;
  std::vector<RequestState*> running_;  // in order of admission
  std::deque<RequestState*> turns_;     // prompts not dealt to their end; the front is next
};

}  // namespace k3
