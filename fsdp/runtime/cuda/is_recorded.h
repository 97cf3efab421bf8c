#pragma once

#include <cuda_runtime_api.h>

#include "fsdp/runtime/cuda/cuda_check.h"

namespace fsdp {

// Whether what is enqueued on the stream becomes part of a graph.
[[nodiscard]] inline bool is_recorded(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  FSDP_CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace fsdp
