// One rank's device: where its streams, memory and clock come from. The same scheduler runs on every kind.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <string>

#include "fsdp/base/types.h"
#include "fsdp/runtime/stream.h"
#include "fsdp/trace/recorder.h"

namespace fsdp {

class Runtime {
 public:
  virtual ~Runtime() = default;

  [[nodiscard]] virtual c10::Device device() const = 0;

  // The stream on which the calling thread computes right now; ask anew at every use.
  [[nodiscard]] virtual Stream compute_stream() = 0;

  // A further stream, distinct from compute and from all others. Lives as long as its handles.
  [[nodiscard]] virtual Stream make_stream(const std::string& name) = 0;

  // Device memory of exactly this size; empty for devices without data. The caller orders its reuse by events.
  [[nodiscard]] virtual c10::DataPtr allocate(Bytes size) = 0;

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

// Throws UsageError in a build without CUDA.
[[nodiscard]] std::shared_ptr<Runtime> make_cuda_runtime(int device_index);

}  // namespace fsdp
