// A small pool for the phases of a step: one caller, short jobs, a barrier after each.
//
// The caller waits for the items, not for the threads: a worker that the operating system has put
// aside delays nothing but an item it already holds. Idle workers spin for a few microseconds (the
// next phase usually follows at once) and then sleep, so that a busy machine is not kept busier.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <type_traits>
#include <vector>

namespace k3 {

class ThreadPool {
 public:
  // `num_threads` counts the caller: 1 starts no thread.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls fn(i, thread) for each i in [0, n), in any order; returns when all are done. `thread` in
  // [0, num_threads) is the caller of fn, for scratch memory. n < 2^31. Not reentrant, and one
  // caller at a time. fn must not throw.
  template <typename F>
  void parallel_for(int64_t n, F&& fn) {
    using Fn = std::remove_reference_t<F>;
    run(
        n, [](void* ctx, int64_t i, int thread) { (*static_cast<Fn*>(ctx))(i, thread); },
        const_cast<void*>(static_cast<const void*>(&fn)));
  }

 private:
  using ItemFn = void (*)(void* ctx, int64_t item, int thread);
  void run(int64_t n, ItemFn fn, void* ctx);
  void claim_and_run(uint32_t generation, int thread);
  void work(int thread);

  // (generation << 32) | next item. A claim is a compare-exchange on both, so that a late worker
  // cannot take an item of a job that has ended.
  std::atomic<uint64_t> ticket_{0};
  std::atomic<uint32_t> generation_{0};  // what sleepers wait on
  std::atomic<int64_t> done_{0};
  std::atomic<bool> stop_{false};
  std::atomic<int64_t> items_{0};  // of the current job; read before a claim
  // The current job. Relaxed: written before the ticket is released, read after a claim.
  std::atomic<ItemFn> fn_{nullptr};
  std::atomic<void*> ctx_{nullptr};
  std::vector<std::thread> workers_;
};

// Cores this process may run on (affinity mask), at least 1.
int available_cores();

}  // namespace k3
