// A step recorded as one CUDA graph.
//
// Recording runs the host side of a step on a stream of its own; nothing computes. Streams that the step may use join
// the recording at its begin and leave it at its end, so an unused one does no harm. Memory of the step comes from a
// pool that belongs to the graph.
#pragma once

#include <ATen/cuda/CUDAGraph.h>

#include <functional>
#include <memory>
#include <vector>

#include "fsdp/runtime/cuda/cuda_stream.h"
#include "fsdp/runtime/runtime.h"

namespace fsdp::cuda {

struct CaptureStreams {
  std::shared_ptr<CudaStream> compute;              // current while recording
  std::vector<std::shared_ptr<CudaStream>> others;  // all that the step may use
};

// Throws UsageError with CUDA's reason when something cannot be recorded; allocator and random numbers are then usable
// as before.
[[nodiscard]] std::unique_ptr<DeviceGraph> capture(const CaptureStreams& streams, const std::function<void()>& step);

}  // namespace fsdp::cuda
