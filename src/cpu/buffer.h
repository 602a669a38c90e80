// Zeroed float or byte storage whose pages the system provides on first touch, so that reserving
// for the largest step or a full cache costs nothing until it is used.
#pragma once

#include <cstdlib>
#include <memory>
#include <string>

#include "core/status.h"

namespace k3 {

template <typename T>
class Buffer {
 public:
  Status allocate(const std::string& what, int64_t count) {
    const size_t n = count > 0 ? static_cast<size_t>(count) : 1;
    data_.reset(static_cast<T*>(std::calloc(n, sizeof(T))));
    size_ = count;
    if (data_) return {};
    return {ErrorCode::kMemory, cat(what, ": cannot allocate ", n * sizeof(T), " bytes")};
  }
  T* data() { return data_.get(); }
  const T* data() const { return data_.get(); }
  int64_t size() const { return size_; }
  int64_t bytes() const { return size_ * static_cast<int64_t>(sizeof(T)); }

 private:
  struct Free {
    void operator()(T* p) const { std::free(p); }
  };
  std::unique_ptr<T, Free> data_;
  int64_t size_ = 0;
};

}  // namespace k3
