// Slots and KV pages are both just numbers that are free or taken.
#pragma once

#include <cassert>
#include <cstdint>
#include <span>
#include <vector>

#include "executor/executor.h"

namespace k3 {

// Pages that hold `tokens` tokens (tokens >= 0).
constexpr int64_t pages_for(int64_t tokens) {
  return tokens / kPageTokens + (tokens % kPageTokens != 0 ? 1 : 0);
}

// The ids [0, count). Last returned, first taken: a page still warm in the caches goes first.
class IdPool {
 public:
  explicit IdPool(int64_t count) : taken_(static_cast<size_t>(count), false) {
    free_.reserve(taken_.size());
    for (int64_t id = count; id-- > 0;) free_.push_back(static_cast<int32_t>(id));
  }

  int64_t num_free() const { return static_cast<int64_t>(free_.size()); }
  int64_t total() const { return static_cast<int64_t>(taken_.size()); }

  // All n or none: false, and *out untouched, when fewer than n are free.
  bool take(int64_t n, std::vector<int32_t>* out) {
    if (n > num_free()) return false;
    for (; n > 0; --n) {
      taken_[static_cast<size_t>(free_.back())] = true;
      out->push_back(free_.back());
      free_.pop_back();
    }
    return true;
  }

  void give_back(std::span<const int32_t> ids) {
    for (int32_t id : ids) {
      assert(taken_[static_cast<size_t>(id)] && "returned twice");
      taken_[static_cast<size_t>(id)] = false;
      free_.push_back(id);
    }
  }

 private:
  std::vector<int32_t> free_;
  std::vector<bool> taken_;
};

}  // namespace k3
