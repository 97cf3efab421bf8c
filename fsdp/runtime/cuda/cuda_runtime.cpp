#include <ATen/Context.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <nvtx3/nvToolsExt.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <vector>

#include "fsdp/runtime/cuda/cuda_check.h"
#include "fsdp/runtime/cuda/cuda_graph.h"
#include "fsdp/runtime/cuda/cuda_kernels.h"
#include "fsdp/runtime/cuda/cuda_stream.h"
#include "fsdp/runtime/cuda_module.h"
#include "fsdp/runtime/kernels.h"
#include "fsdp/runtime/runtime.h"

namespace fsdp::cuda {
namespace {

class CudaRuntime final : public Runtime {
 public:
  explicit CudaRuntime(int index) : index_(static_cast<c10::DeviceIndex>(index)) {
    FSDP_CUDA_CHECK(cudaSetDevice(index));
    at::globalContext().lazyInitDevice(c10::kCUDA);
    kernels_ = make_kernels();
  }

  [[nodiscard]] c10::Device device() const override { return {c10::kCUDA, index_}; }

  [[nodiscard]] Stream compute_stream() override {
    const auto current = c10::cuda::getCurrentCUDAStream(index_);
    std::lock_guard lock(mutex_);  // backward runs on another thread, while this one waits
    for (const auto& known : compute_) {
      if (known->stream() == current) return Stream(known);
    }
    for (const auto& other : others_) {  // a schedule may compute on a stream that was made
      const auto known = other.lock();
      if (known && known->stream() == current) return Stream(known);
    }
    compute_.push_back(std::make_shared<CudaStream>("compute", 0, clocks_++, current));
    return Stream(compute_.back());
  }

  [[nodiscard]] Stream make_stream(const std::string& name) override {
    std::lock_guard lock(mutex_);
    std::erase_if(others_, [](const auto& stream) { return stream.expired(); });
    auto stream = std::make_shared<CudaStream>(name, ++streams_, clocks_++,
                                               c10::cuda::getStreamFromPool(/*isHighPriority=*/true, index_));
    others_.push_back(stream);
    return Stream(stream);
  }

  [[nodiscard]] c10::DataPtr allocate(Bytes size, const Stream& owner) override {
    c10::DataPtr data;
    owner.enqueue(
        [&] { data = c10::cuda::CUDACachingAllocator::get()->allocate(static_cast<std::size_t>(size.value())); });
    return data;
  }
  [[nodiscard]] bool caches_memory() const override { return true; }
  [[nodiscard]] bool enqueue_sets_current_stream() const override { return true; }

  void copy(void* to, const void* from, Bytes size, const Stream& stream) override {
    if (size == Bytes(0)) return;
    FSDP_CUDA_CHECK(
        cudaMemcpyAsync(to, from, static_cast<std::size_t>(size.value()), cudaMemcpyDeviceToDevice, raw(stream)));
  }
  void clear(void* data, Bytes size, const Stream& stream) override {
    if (size == Bytes(0)) return;
    FSDP_CUDA_CHECK(cudaMemsetAsync(data, 0, static_cast<std::size_t>(size.value()), raw(stream)));
  }
  void synchronize() override { FSDP_CUDA_CHECK(cudaDeviceSynchronize()); }
  [[nodiscard]] Kernels* kernels() override { return kernels_.get(); }
  [[nodiscard]] trace::Nanoseconds blocked_time() const override { return 0; }  // profile instead (device_profile.h)

  [[nodiscard]] DeviceMemory device_memory() const override {
    const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(index_);
    constexpr auto kAll = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    std::size_t free = 0, total = 0;
    FSDP_CUDA_CHECK(cudaMemGetInfo(&free, &total));
    return {Bytes(stats.allocated_bytes[kAll].current), Bytes(stats.allocated_bytes[kAll].peak),
            Bytes(stats.reserved_bytes[kAll].current), Bytes(static_cast<std::int64_t>(free))};
  }
  void reset_device_peak() override { c10::cuda::CUDACachingAllocator::resetPeakStats(index_); }

  std::uint64_t begin_range(const char* name) override { return nvtxRangeStartA(name); }
  void end_range(std::uint64_t range) override { nvtxRangeEnd(range); }

  [[nodiscard]] std::unique_ptr<DeviceGraph> capture(const std::function<void()>& step) override {
    if (!capture_stream_) {
      capture_stream_ =
          std::make_shared<CudaStream>("compute", 0, clocks_++, c10::cuda::getStreamFromPool(true, index_));
      compute_.push_back(capture_stream_);
    }
    CaptureStreams streams{capture_stream_, {}};
    for (const auto& weak : others_) {
      if (auto stream = weak.lock()) streams.others.push_back(std::move(stream));
    }
    capturing_ = true;
    struct Ended {
      bool& flag;
      ~Ended() { flag = false; }
    } ended{capturing_};
    for (const auto& known : compute_) known->forget_marks();
    return cuda::capture(streams, step);
  }
  [[nodiscard]] bool capturing() const override { return capturing_; }

 private:
  static cudaStream_t raw(const Stream& stream) {
    return static_cast<CudaStream*>(stream.backend())->stream().stream();
  }

  c10::DeviceIndex index_;
  std::unique_ptr<Kernels> kernels_;
  std::mutex mutex_;
  std::vector<std::shared_ptr<CudaStream>> compute_;  // every stream that was ever current
  std::vector<std::weak_ptr<CudaStream>> others_;
  std::shared_ptr<CudaStream> capture_stream_;
  int streams_ = 0, clocks_ = 0;
  bool capturing_ = false;
};

int device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return 0;
  }
  return count;
}

int current_device() {
  int device = 0;
  FSDP_CUDA_CHECK(cudaGetDevice(&device));
  return device;
}

std::shared_ptr<Runtime> make_runtime(int index) { return std::make_shared<CudaRuntime>(index); }

}  // namespace
}  // namespace fsdp::cuda

extern "C" const fsdp::CudaRuntimeModule fsdp_cuda_runtime{fsdp::kCudaModuleVersion, &fsdp::cuda::device_count,
                                                           &fsdp::cuda::current_device, &fsdp::cuda::make_runtime};
