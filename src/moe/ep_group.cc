#include "moe/ep_group.h"

#include <utility>

namespace k3 {

EpGroup::EpGroup(const SlabShape& shape, double timeout_seconds)
    : shape_(shape), timeout_seconds_(timeout_seconds) {
  for (int64_t r = 0; r < shape.world; ++r) doors_.push_back(std::make_unique<Door>());
}

void EpGroup::ring(int64_t rank) {
  Door& door = *doors_[static_cast<size_t>(rank)];
  std::lock_guard lock(door.mutex);
  door.rung.notify_all();
  if (door.call) door.call();
}

void EpGroup::on_ring(int64_t rank, std::function<void()> call) {
  Door& door = *doors_[static_cast<size_t>(rank)];
  std::lock_guard lock(door.mutex);
  door.call = std::move(call);
}

void EpGroup::fail(const Status& status) {
  {
    std::lock_guard lock(failure_mutex_);
    if (!failure_.ok()) return;
    failure_ = status;
  }
  failed_.store(true, std::memory_order_release);
  for (int64_t r = 0; r < shape_.world; ++r) ring(r);
}

Status EpGroup::failure() const {
  std::lock_guard lock(failure_mutex_);
  return failure_;
}

Result<std::unique_ptr<ThreadGroup>> ThreadGroup::create(const SlabShape& shape,
                                                         double timeout_seconds) {
  std::unique_ptr<ThreadGroup> group(new ThreadGroup(shape, timeout_seconds));
  for (int64_t r = 0; r < shape.world; ++r) {
    K3_ASSIGN_OR_RETURN(std::unique_ptr<Slab> slab, Slab::create(shape));
    group->slabs_.push_back(std::move(slab));
  }
  return group;
}

void ThreadGroup::publish_dispatch(int64_t from, int64_t to, uint64_t generation) {
  slab(to).flags(from).dispatched.store(generation, std::memory_order_release);
  ring(to);
}

void ThreadGroup::publish_return(int64_t from, int64_t to, uint64_t generation,
                                 std::span<const int32_t> /*written in place*/) {
  slab(to).flags(from).returned.store(generation, std::memory_order_release);
  ring(to);
}

}  // namespace k3
