#include "fsdp/runtime/cuda/cuda_graph.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>

#include <exception>

#include "fsdp/runtime/cuda/cuda_check.h"

namespace fsdp::cuda {
namespace {

class Graph final : public DeviceGraph {
 public:
  void replay() override { graph.replay(); }
  at::cuda::CUDAGraph graph;
};

void forget_marks(const CaptureStreams& streams) {
  streams.compute->forget_marks();
  for (const auto& stream : streams.others) stream->forget_marks();
}

// After a failed recording the generator believes that one is still going on; an empty one that succeeds sets it right.
void record_nothing() {
  at::cuda::CUDAGraph empty;
  empty.capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
  empty.capture_end();
}

std::string reason(const std::exception& error) {
  const std::string text = error.what();
  return text.substr(0, text.find("\nException raised from"));
}

}  // namespace

std::unique_ptr<DeviceGraph> capture(const CaptureStreams& streams, const std::function<void()>& step) {
  FSDP_CUDA_CHECK(cudaDeviceSynchronize());
  forget_marks(streams);
  c10::cuda::CUDAStreamGuard current(streams.compute->stream());
  const auto pool = at::cuda::graph_pool_handle();
  const auto device = streams.compute->stream().device_index();
  auto graph = std::make_unique<Graph>();
  std::string failure;
  graph->graph.capture_begin(pool, cudaStreamCaptureModeThreadLocal);
  try {
    const Stream compute(streams.compute);
    Event begin, end;
    compute.record(begin);
    for (const auto& other : streams.others) Stream(other).wait(begin);
    step();
    for (const auto& other : streams.others) {
      Stream(other).record(end);
      compute.wait(end);
    }
  } catch (const std::exception& error) {
    failure = reason(error);
  }
  try {
    graph->graph.capture_end();
  } catch (const std::exception& error) {
    if (failure.empty()) failure = reason(error);
    c10::cuda::CUDACachingAllocator::endAllocateToPool(device, pool);
  }
  forget_marks(streams);
  if (failure.empty()) return graph;
  static_cast<void>(cudaGetLastError());
  graph.reset();
  record_nothing();
  FSDP_CUDA_CHECK(cudaDeviceSynchronize());
  detail::fail<UsageError>(
      "the step cannot be captured: {}. A captured step must not wait for the device (item(), printing a tensor, a "
      "copy to the host), and everything in it must have run once before",
      failure);
}

}  // namespace fsdp::cuda
