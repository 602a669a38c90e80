#include "core/thread_pool.h"

#include <sched.h>

namespace k3 {
namespace {

// About 20 us on current cores: longer than the gap between two phases of a step, far shorter than
// a scheduler's time slice.
constexpr int kSpins = 4000;

inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

int available_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) {
    const int n = CPU_COUNT(&set);
    if (n > 0) return n;
  }
  const unsigned n = std::thread::hardware_concurrency();
  return n > 0 ? static_cast<int>(n) : 1;
}

ThreadPool::ThreadPool(int num_threads) {
  for (int i = 1; i < num_threads; ++i) workers_.emplace_back([this, i] { work(i); });
}

ThreadPool::~ThreadPool() {
  stop_.store(true);
  generation_.fetch_add(1);
  generation_.notify_all();
  for (std::thread& t : workers_) t.join();
}

void ThreadPool::claim_and_run(uint32_t generation, int thread) {
  uint64_t ticket = ticket_.load(std::memory_order_acquire);
  for (;;) {
    if (static_cast<uint32_t>(ticket >> 32) != generation) return;
    const auto item = static_cast<int64_t>(ticket & 0xffffffffu);
    // items_ may already belong to a newer job here; then the exchange below fails. Acquire:
    // whoever sees the newer count must also see that the ticket has moved on.
    if (item >= items_.load(std::memory_order_acquire)) return;
    if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel,
                                       std::memory_order_acquire)) {
      continue;
    }
    // The job cannot end before this item does, so its fields stand still.
    fn_.load(std::memory_order_relaxed)(ctx_.load(std::memory_order_relaxed), item, thread);
    done_.fetch_add(1, std::memory_order_acq_rel);
    ticket = ticket_.load(std::memory_order_acquire);
  }
}

void ThreadPool::run(int64_t n, ItemFn fn, void* ctx) {
  if (n <= 0) return;
  if (n == 1 || workers_.empty()) {
    for (int64_t i = 0; i < n; ++i) fn(ctx, i, 0);
    return;
  }
  // The last job has ended (all items done), but a late worker may still be between reading the old
  // ticket and failing its claim; the ticket's new generation makes that claim fail.
  const uint32_t generation = generation_.load(std::memory_order_relaxed) + 1;
  ticket_.store((static_cast<uint64_t>(generation) << 32) | 0xffffffffu, std::memory_order_release);
  items_.store(n, std::memory_order_release);
  fn_.store(fn, std::memory_order_relaxed);
  ctx_.store(ctx, std::memory_order_relaxed);
  done_.store(0, std::memory_order_relaxed);
  ticket_.store(static_cast<uint64_t>(generation) << 32, std::memory_order_release);
  generation_.store(generation, std::memory_order_release);
  generation_.notify_all();
  claim_and_run(generation, 0);
  for (int spins = 0; done_.load(std::memory_order_acquire) < n; ++spins) {
    if (spins < kSpins) {
      cpu_relax();
    } else {
      std::this_thread::yield();  // a worker holds an item and has lost its core to someone
    }
  }
}

void ThreadPool::work(int thread) {
  uint32_t seen = 0;
  for (;;) {
    uint32_t generation = generation_.load(std::memory_order_acquire);
    for (int spins = 0; generation == seen && spins < kSpins; ++spins) {
      cpu_relax();
      generation = generation_.load(std::memory_order_acquire);
    }
    if (generation == seen) {
      generation_.wait(seen, std::memory_order_acquire);
      continue;
    }
    if (stop_.load()) return;
    seen = generation;
    claim_and_run(generation, thread);
  }
}

}  // namespace k3
