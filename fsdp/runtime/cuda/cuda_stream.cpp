#include "fsdp/runtime/cuda/cuda_stream.h"

#include <algorithm>
#include <chrono>

#include "fsdp/runtime/cuda/cuda_check.h"

namespace fsdp::cuda {

CudaStream::CudaStream(std::string name, int id, int clock, c10::cuda::CUDAStream stream)
    : StreamBackend(std::move(name), id), stream_(stream), clock_(clock), marks_(kMarks) {}

CudaStream::~CudaStream() {
  for (Mark& mark : marks_) {
    if (mark.event != nullptr) cudaEventDestroy(mark.event);
  }
}

void CudaStream::enqueue(Task task, TaskOptions) {
  struct Current {
    explicit Current(c10::cuda::CUDAStream stream)
        : previous(c10::cuda::getCurrentCUDAStream(stream.device_index())), changed(previous != stream) {
      if (changed) c10::cuda::setCurrentCUDAStream(stream);
    }
    ~Current() {
      if (changed) c10::cuda::setCurrentCUDAStream(previous);
    }
    c10::cuda::CUDAStream previous;
    bool changed;
  } current(stream_);
  task();
}

std::int64_t CudaStream::record() {
  Mark& mark = slot(++last_);
  if (mark.event == nullptr) FSDP_CUDA_CHECK(cudaEventCreateWithFlags(&mark.event, cudaEventDisableTiming));
  FSDP_CUDA_CHECK(cudaEventRecord(mark.event, stream_.stream()));
  mark.number = last_;
  mark.seen = seen_;
  return last_;
}

void CudaStream::wait(const Event& event) {
  auto& other = static_cast<CudaStream&>(*event.stream());
  if (event.mark() <= other.forgotten_) return;
  const bool counted = other.clock_ < kClocks;
  if (counted && event.mark() <= seen_[other.clock_]) return;
  const Mark& mark = other.slot(event.mark());
  FSDP_CUDA_CHECK(cudaStreamWaitEvent(stream_.stream(), mark.event, 0));
  for (int i = 0; i < kClocks; ++i) seen_[i] = std::max(seen_[i], mark.seen[i]);
  if (counted) seen_[other.clock_] = std::max(seen_[other.clock_], mark.number);
}

bool CudaStream::reached(std::int64_t mark) {
  if (mark <= forgotten_) return true;
  const cudaError_t code = cudaEventQuery(slot(mark).event);
  if (code == cudaErrorNotReady) return false;
  FSDP_CUDA_CHECK(code);
  return true;
}

void CudaStream::synchronize_host(std::int64_t mark) {
  if (mark > forgotten_) FSDP_CUDA_CHECK(cudaEventSynchronize(slot(mark).event));
}

void CudaStream::reset() { FSDP_CUDA_CHECK(cudaStreamSynchronize(stream_.stream())); }

trace::Nanoseconds CudaStream::now() const {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void CudaStream::forget_marks() {
  forgotten_ = last_;
  seen_ = {};
}

}  // namespace fsdp::cuda
