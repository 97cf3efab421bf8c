// Makes a stream take the time of a link without holding a multiprocessor: the stream tells the host that it has come
// to a point, and waits for the host's answer some time later. Accurate to a few microseconds.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <thread>

namespace fsdp {

class LinkTimer {
 public:
  LinkTimer();
  ~LinkTimer();
  LinkTimer(const LinkTimer&) = delete;
  LinkTimer& operator=(const LinkTimer&) = delete;

  // What is enqueued between the two takes at least `nanoseconds` together.
  void begin(cudaStream_t stream, std::int64_t nanoseconds);
  void end(cudaStream_t stream);

 private:
  static constexpr std::uint32_t kSlots = 1024;
  struct Shared {                         // in pinned memory
    volatile std::uint32_t started = 0;   // number of the last operation that began; written by the stream
    volatile std::uint32_t released = 0;  // and of the last that may end; written by the host
  };

  void run();

  Shared* shared_ = nullptr;
  CUdeviceptr device_ = 0;  // of `shared_`
  std::uint32_t issued_ = 0;
  std::atomic<std::int64_t> durations_[kSlots] = {};  // [number % kSlots]
  std::atomic<bool> stopping_{false};
  CUresult (*write_value_)(CUstream, CUdeviceptr, cuuint32_t, unsigned int) = nullptr;
  CUresult (*wait_value_)(CUstream, CUdeviceptr, cuuint32_t, unsigned int) = nullptr;
  std::thread thread_;
};

}  // namespace fsdp
