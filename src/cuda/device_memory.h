// Memory of the card and pinned memory of the host, owned. Whatever fails names the item and the
// bytes.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "core/status.h"
#include "cuda/launch.h"

namespace k3::cuda {

// One allocation that many arrays are cut from. The same code runs twice: before allocate() take()
// only counts, afterwards it hands out addresses; so the size is known before the first byte, and
// nothing is allocated later.
class DeviceArena {
 public:
  DeviceArena() = default;
  ~DeviceArena();
  DeviceArena(const DeviceArena&) = delete;
  DeviceArena& operator=(const DeviceArena&) = delete;

  // `count` elements at a multiple of 256 bytes; null while counting.
  template <typename T>
  T* take(int64_t count) {
    return reinterpret_cast<T*>(take_bytes(count * static_cast<int64_t>(sizeof(T))));
  }
  // Allocates what has been counted and starts over. kMemory names `what`.
  Status allocate(const std::string& what);
  // Every byte becomes `value`.
  Status fill(int value);
  int64_t bytes() const { return base_ != nullptr ? size_ : used_; }
  const std::byte* data() const { return base_; }

 private:
  std::byte* take_bytes(int64_t bytes);
  std::byte* base_ = nullptr;
  int64_t size_ = 0, used_ = 0;
};

class PinnedBuffer {
 public:
  PinnedBuffer() = default;
  ~PinnedBuffer();
  PinnedBuffer(const PinnedBuffer&) = delete;
  PinnedBuffer& operator=(const PinnedBuffer&) = delete;
  Status allocate(const std::string& what, int64_t bytes);
  std::byte* data() const { return data_; }
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }
  int64_t bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  int64_t bytes_ = 0;
};

class Stream {
 public:
  Stream() = default;
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  Status create();
  cudaStream_t get() const { return stream_; }
  // Waits for all work; reports what failed on the device since the last call.
  Status synchronize(const char* what);

 private:
  cudaStream_t stream_ = nullptr;
};

// A captured sequence of launches.
class Graph {
 public:
  Graph() = default;
  ~Graph();
  Graph(Graph&& other) noexcept : exec_(std::exchange(other.exec_, nullptr)) {}
  Graph& operator=(Graph&& other) noexcept {
    std::swap(exec_, other.exec_);
    return *this;
  }
  // Captures what `enqueue` launches on `stream`.
  template <typename F>
  Status capture(cudaStream_t stream, F&& enqueue) {
    K3_RETURN_IF_ERROR(
        cuda_check("cudaStreamBeginCapture",
                   cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal)));
    const Status enqueued = enqueue();
    return finish(stream, enqueued);
  }
  bool captured() const { return exec_ != nullptr; }
  Status launch(cudaStream_t stream) const {
    return cuda_check("cudaGraphLaunch", cudaGraphLaunch(exec_, stream));
  }

 private:
  Status finish(cudaStream_t stream, const Status& enqueued);
  cudaGraphExec_t exec_ = nullptr;
};

// Device time between two points of a stream.
class Stopwatch {
 public:
  Stopwatch() = default;
  ~Stopwatch();
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;
  Status start(cudaStream_t stream);
  // Waits for the work in between; seconds since start().
  Result<double> stop(cudaStream_t stream);

 private:
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

}  // namespace k3::cuda
