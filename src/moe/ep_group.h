// Ranks as threads of one process: a slab and a doorbell for each, reachable by all. The form the GPU
// mirrors, with peer pointers where this has pointers.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "core/status.h"
#include "moe/slab.h"

namespace k3 {

class EpGroup {
 public:
  // timeout_seconds: how long a rank waits for one peer before it gives the group up (kRankLost).
  static Result<std::unique_ptr<EpGroup>> create(const SlabShape& shape, double timeout_seconds);

  const SlabShape& shape() const { return shape_; }
  double timeout_seconds() const { return timeout_seconds_; }
  Slab& slab(int64_t rank) { return *slabs_[static_cast<size_t>(rank)]; }

  // Wakes `rank` after something was published to it.
  void ring(int64_t rank);
  // Also called at each ring of `rank`, on the peer's thread; must not block. Empty: nobody.
  void on_ring(int64_t rank, std::function<void()> call);

  // Sleeps until ready() (checked at each ring), the group fails or the timeout is over. False: timed
  // out. Sleeps rather than spins: ranks of one process share its cores.
  template <typename Ready>
  bool wait(int64_t rank, const Ready& ready) {
    Door& door = *doors_[static_cast<size_t>(rank)];
    std::unique_lock lock(door.mutex);
    return door.rung.wait_for(lock, std::chrono::duration<double>(timeout_seconds_),
                              [&] { return ready() || failed_.load(std::memory_order_acquire); });
  }

  // The first failure is the group's: every rank's wait ends. Later ones are ignored.
  void fail(const Status& status);
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  Status failure() const;

 private:
  struct Door {
    std::mutex mutex;
    std::condition_variable rung;
    std::function<void()> call;
  };
  EpGroup() = default;
  SlabShape shape_;
  double timeout_seconds_ = 0;
  std::vector<std::unique_ptr<Slab>> slabs_;
  std::vector<std::unique_ptr<Door>> doors_;
  mutable std::mutex failure_mutex_;
  Status failure_;
  std::atomic<bool> failed_{false};
};

}  // namespace k3
