// One rank's device: where its streams, memory and clock come from. The same scheduler runs on every kind.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "fsdp/base/types.h"
#include "fsdp/runtime/stream.h"
#include "fsdp/trace/recorder.h"

namespace fsdp {

class Kernels;

// Work recorded once, run again as a whole: a CUDA graph.
class DeviceGraph {
 public:
  virtual ~DeviceGraph() = default;
  virtual void replay() = 0;  // enqueued on the current stream
};

class Runtime {
 public:
  virtual ~Runtime() = default;

  [[nodiscard]] virtual c10::Device device() const = 0;

  // The stream on which the calling thread computes right now; ask anew at every use.
  [[nodiscard]] virtual Stream compute_stream() = 0;

  // A further stream, distinct from compute and from all others. Lives as long as its handles.
  [[nodiscard]] virtual Stream make_stream(const std::string& name) = 0;

  // Whether Stream::enqueue runs its task on the calling thread, with that stream current: what the task calls then
  // runs on the stream. Elsewhere a task runs on the stream's own thread.
  [[nodiscard]] virtual bool enqueue_sets_current_stream() const { return false; }

  // Device memory of exactly this size; empty for devices without data. Once freed it is used again in the order of
  // `owner`: who lets another stream touch it orders that stream after the allocation, and `owner` after it before the
  // memory is freed.
  [[nodiscard]] virtual c10::DataPtr allocate(Bytes size, const Stream& owner) = 0;
  // Whether freed memory is kept and handed out again at no cost.
  [[nodiscard]] virtual bool caches_memory() const { return false; }

  // Enqueued on `stream`; nothing happens where there is no data.
  virtual void copy(void* to, const void* from, Bytes size, const Stream& stream);
  virtual void clear(void* data, Bytes size, const Stream& stream);  // to zero

  // Waits until the device has done all that this process has enqueued, on any stream, replays included.
  virtual void synchronize() {}

  // The library's own kernels; null where the host computes.
  [[nodiscard]] virtual Kernels* kernels() { return nullptr; }

  // Bytes that this process holds on the device, as its allocator counts them; zero on the CPU and where unknown.
  struct DeviceMemory {
    Bytes in_use, peak, reserved;
    Bytes free;  // of the whole device, whoever uses the rest
  };
  [[nodiscard]] virtual DeviceMemory device_memory() const { return {}; }
  virtual void reset_device_peak() {}

  // Named ranges in the timeline of an attached profiler (NVTX). Cheap when none is. `name` outlives the range.
  virtual std::uint64_t begin_range(const char*) { return 0; }
  virtual void end_range(std::uint64_t) {}

  // Records what `step` enqueues, runs nothing of it, and returns what runs it. Throws UsageError with the reason when
  // something in it cannot be recorded; everything is then as before.
  [[nodiscard]] virtual std::unique_ptr<DeviceGraph> capture(const std::function<void()>& step);
  [[nodiscard]] virtual bool capturing() const { return false; }

  // Host time so far in which this rank's compute stood still for communication; grows monotonically.
  [[nodiscard]] virtual trace::Nanoseconds blocked_time() const = 0;

  // Spans are recorded while a recorder is set. Set it when no work is in flight.
  void set_recorder(std::shared_ptr<trace::Recorder> recorder) { recorder_ = std::move(recorder); }
  [[nodiscard]] trace::Recorder* recorder() const { return recorder_.get(); }

 private:
  std::shared_ptr<trace::Recorder> recorder_;
};

// Ranks on the CPU: compute is the calling thread, every further stream a worker thread.
[[nodiscard]] std::shared_ptr<Runtime> make_cpu_runtime();

// CUDA devices that this process sees; 0 as well when there is no driver, or no module for it.
[[nodiscard]] int cuda_device_count();

// The device that is current in the calling thread: 0 unless a runtime, or whoever else, has chosen another.
[[nodiscard]] int current_cuda_device();

// One CUDA device; compute is whatever stream is current. It becomes the calling thread's current device. Throws
// UsageError when the module libfsdp_cuda.so, a driver or the device is missing.
[[nodiscard]] std::shared_ptr<Runtime> make_cuda_runtime(int device_index);

// Why CUDA cannot be used; empty when it can.
[[nodiscard]] std::string why_no_cuda();

}  // namespace fsdp
