#include "fsdp/comm/loopback/link_timer.h"

#include <chrono>
#include <cstddef>
#include <new>

#include "fsdp/runtime/cuda/driver_function.h"

namespace fsdp {
namespace {

constexpr auto kIdlePause = std::chrono::microseconds(2);

}  // namespace

LinkTimer::LinkTimer() {
  find_driver_function("cuStreamWriteValue32", write_value_);
  find_driver_function("cuStreamWaitValue32", wait_value_);
  void* memory = nullptr;
  FSDP_CUDA_CHECK(cudaHostAlloc(&memory, sizeof(Shared), cudaHostAllocMapped));
  shared_ = new (memory) Shared;
  void* device = nullptr;
  FSDP_CUDA_CHECK(cudaHostGetDevicePointer(&device, memory, 0));
  device_ = reinterpret_cast<CUdeviceptr>(device);
  thread_ = std::thread([this] { run(); });
}

LinkTimer::~LinkTimer() {
  stopping_ = true;
  thread_.join();
  cudaFreeHost(shared_);
}

void LinkTimer::begin(cudaStream_t stream, std::int64_t nanoseconds) {
  const std::uint32_t number = ++issued_;
  FSDP_CHECK(number - shared_->released < kSlots, Error, "loopback: more than {} operations under way", kSlots);
  durations_[number % kSlots] = nanoseconds;
  FSDP_INVARIANT(write_value_(stream, device_ + offsetof(Shared, started), number, CU_STREAM_WRITE_VALUE_DEFAULT) ==
                 CUDA_SUCCESS);
}

void LinkTimer::end(cudaStream_t stream) {
  FSDP_INVARIANT(wait_value_(stream, device_ + offsetof(Shared, released), issued_, CU_STREAM_WAIT_VALUE_GEQ) ==
                 CUDA_SUCCESS);
}

void LinkTimer::run() {
  using Clock = std::chrono::steady_clock;
  std::uint32_t done = 0;
  while (!stopping_) {
    if (shared_->started == done) {
      std::this_thread::sleep_for(kIdlePause);
      continue;
    }
    const auto start = Clock::now();
    ++done;
    const auto end = start + std::chrono::nanoseconds(durations_[done % kSlots].load());
    while (Clock::now() < end && !stopping_) {
    }
    shared_->released = done;
  }
  shared_->released = issued_;
}

}  // namespace fsdp
