#include "cuda/device_memory.h"

namespace k3::cuda {

Status cuda_error(const char* what, cudaError_t error) {
  const ErrorCode code =
      error == cudaErrorMemoryAllocation ? ErrorCode::kMemory : ErrorCode::kDevice;
  return {code, cat(what, ": ", cudaGetErrorName(error), ": ", cudaGetErrorString(error))};
}

namespace {

Status allocation_error(const std::string& what, int64_t bytes, cudaError_t error) {
  static_cast<void>(cudaGetLastError());  // an allocation that failed harms nothing that follows
  return cuda_error(cat(what, ", ", bytes, " bytes").c_str(), error);
}

}  // namespace

DeviceArena::~DeviceArena() {
  if (base_ != nullptr) cudaFree(base_);
}

std::byte* DeviceArena::take_bytes(int64_t bytes) {
  constexpr int64_t kAlign = 256;
  const int64_t at = used_;
  used_ = at + (bytes + kAlign - 1) / kAlign * kAlign;
  return base_ == nullptr ? nullptr : base_ + at;
}

Status DeviceArena::allocate(const std::string& what) {
  size_ = used_;
  used_ = 0;
  if (size_ == 0) size_ = 256;  // so that an empty arena still counts as allocated
  void* p = nullptr;
  if (const cudaError_t e = cudaMalloc(&p, static_cast<size_t>(size_)); e != cudaSuccess) {
    return allocation_error(what, size_, e);
  }
  base_ = static_cast<std::byte*>(p);
  return {};
}

Status DeviceArena::fill(int value) {
  return cuda_check("cudaMemset", cudaMemset(base_, value, static_cast<size_t>(size_)));
}

PinnedBuffer::~PinnedBuffer() {
  if (data_ != nullptr) cudaFreeHost(data_);
}

Status PinnedBuffer::allocate(const std::string& what, int64_t bytes) {
  void* p = nullptr;
  if (const cudaError_t e = cudaMallocHost(&p, static_cast<size_t>(bytes)); e != cudaSuccess) {
    return allocation_error(what + " (pinned host memory)", bytes, e);
  }
  data_ = static_cast<std::byte*>(p);
  bytes_ = bytes;
  return {};
}

Stream::~Stream() {
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
}

Status Stream::create() {
  return cuda_check("cudaStreamCreate", cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
}

Status Stream::synchronize(const char* what) {
  return cuda_check(what, cudaStreamSynchronize(stream_));
}

Graph::~Graph() {
  if (exec_ != nullptr) cudaGraphExecDestroy(exec_);
}

Status Graph::finish(cudaStream_t stream, const Status& enqueued) {
  cudaGraph_t graph = nullptr;
  const cudaError_t ended = cudaStreamEndCapture(stream, &graph);
  Status status = !enqueued.ok() ? enqueued : cuda_check("cudaStreamEndCapture", ended);
  if (status.ok()) {
    status = cuda_check("cudaGraphInstantiate", cudaGraphInstantiate(&exec_, graph, 0));
  }
  if (graph != nullptr) cudaGraphDestroy(graph);
  return status;
}

Stopwatch::~Stopwatch() {
  if (begin_ != nullptr) cudaEventDestroy(begin_);
  if (end_ != nullptr) cudaEventDestroy(end_);
}

Status Stopwatch::start(cudaStream_t stream) {
  if (begin_ == nullptr) {
    K3_RETURN_IF_ERROR(cuda_check("cudaEventCreate", cudaEventCreate(&begin_)));
    K3_RETURN_IF_ERROR(cuda_check("cudaEventCreate", cudaEventCreate(&end_)));
  }
  return cuda_check("cudaEventRecord", cudaEventRecord(begin_, stream));
}

Result<double> Stopwatch::stop(cudaStream_t stream) {
  K3_RETURN_IF_ERROR(cuda_check("cudaEventRecord", cudaEventRecord(end_, stream)));
  K3_RETURN_IF_ERROR(cuda_check("cudaEventSynchronize", cudaEventSynchronize(end_)));
  float ms = 0;
  K3_RETURN_IF_ERROR(cuda_check("cudaEventElapsedTime", cudaEventElapsedTime(&ms, begin_, end_)));
  return static_cast<double>(ms) / 1e3;
}

}  // namespace k3::cuda
