// The ranks of one group as one of them reaches the others: slabs that peers write, doorbells, and
// the group's failure. ThreadGroup has ranks as threads of one process (the form the GPU mirrors,
// with peer pointers where this has pointers); MpiGroup (moe/mpi_group.h) has them as processes.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "core/status.h"
#include "moe/slab.h"

namespace k3 {

class EpGroup {
 public:
  virtual ~EpGroup() = default;
  EpGroup(const EpGroup&) = delete;
  EpGroup& operator=(const EpGroup&) = delete;

  const SlabShape& shape() const { return shape_; }
  double timeout_seconds() const { return timeout_seconds_; }

  // Where rank `from` writes what rank `to` will read: laid out as to's slab, and to's slab itself
  // when the two share memory. window(r, r) is always r's slab.
  virtual Slab& window(int64_t from, int64_t to) = 0;
  Slab& slab(int64_t rank) { return window(rank, rank); }

  // Section [from] of the window's inbox is complete: `to` sees it, then the flag, then its bell.
  virtual void publish_dispatch(int64_t from, int64_t to, uint64_t generation) = 0;
  // The same for the outputs at `assignments` (row * top_k + slot) of the window's `returned`.
  virtual void publish_return(int64_t from, int64_t to, uint64_t generation,
                              std::span<const int32_t> assignments) = 0;

  // Wakes `rank` after something changed in its slab.
  void ring(int64_t rank);
  // Also called at each ring of `rank`, on the peer's thread; must not block. Empty: nobody.
  void on_ring(int64_t rank, std::function<void()> call);

  // Sleeps until ready() (checked at each ring), the group fails or the timeout is over. False:
  // timed out. Sleeps rather than spins: ranks share the machine's cores.
  template <typename Ready>
  bool wait(int64_t rank, const Ready& ready) {
    Door& door = *doors_[static_cast<size_t>(rank)];
    std::unique_lock lock(door.mutex);
    return door.rung.wait_for(lock, std::chrono::duration<double>(timeout_seconds_),
                              [&] { return ready() || failed(); });
  }

  // The first failure is the group's: every rank's wait ends, wherever the rank runs. Later ones
  // are ignored.
  virtual void fail(const Status& status);
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  Status failure() const;

 protected:
  // timeout_seconds: how long a rank waits for one peer before it gives the group up (kRankLost).
  EpGroup(const SlabShape& shape, double timeout_seconds);

 private:
  struct Door {
    std::mutex mutex;
    std::condition_variable rung;
    std::function<void()> call;
  };
  const SlabShape shape_;
  const double timeout_seconds_;
  std::vector<std::unique_ptr<Door>> doors_;
  mutable std::mutex failure_mutex_;
  Status failure_;
  std::atomic<bool> failed_{false};
};

class ThreadGroup : public EpGroup {
 public:
  // kMemory if the slabs do not fit.
  static Result<std::unique_ptr<ThreadGroup>> create(const SlabShape& shape,
                                                     double timeout_seconds);

  Slab& window(int64_t, int64_t to) override { return *slabs_[static_cast<size_t>(to)]; }
  void publish_dispatch(int64_t from, int64_t to, uint64_t generation) override;
  void publish_return(int64_t from, int64_t to, uint64_t generation,
                      std::span<const int32_t> assignments) override;

 private:
  using EpGroup::EpGroup;
  std::vector<std::unique_ptr<Slab>> slabs_;
};

}  // namespace k3
