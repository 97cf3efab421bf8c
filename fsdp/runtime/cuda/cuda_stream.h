// A stream of the CUDA runtime over one of LibTorch's pooled streams.
//
// A task runs at once on the calling thread with this stream current, so what it launches lands here. Events are marks:
// the stream numbers them and keeps the last kMarks CUDA events; waiting for an older mark waits for the one that took
// its place, which comes later on the same stream. Waits that follow from earlier waits are left out: each stream keeps
// what it has seen of the others (a vector clock), for an edge costs host time, and in a graph device time.
#pragma once

#include <c10/cuda/CUDAStream.h>

#include <array>
#include <vector>

#include "fsdp/runtime/stream.h"

namespace fsdp::cuda {

class CudaStream final : public StreamBackend {
 public:
  // `clock`: place in the vector clocks, unique among the streams of a runtime.
  CudaStream(std::string name, int id, int clock, c10::cuda::CUDAStream stream);
  ~CudaStream() override;

  void enqueue(Task task, TaskOptions options) override;
  std::int64_t record() override;
  void wait(const Event& event) override;
  bool reached(std::int64_t mark) override;
  void synchronize_host(std::int64_t mark) override;
  void reset() override;
  [[nodiscard]] trace::Nanoseconds now() const override;

  [[nodiscard]] c10::cuda::CUDAStream stream() const { return stream_; }
  // Everything recorded so far counts as complete: nothing inside a captured step may wait for what lies outside.
  void forget_marks();

 private:
  static constexpr std::int64_t kMarks = 256;  // a power of two
  static constexpr int kClocks = 16;           // streams beyond that are always waited for

  using Clock = std::array<std::int64_t, kClocks>;
  struct Mark {
    cudaEvent_t event = nullptr;
    std::int64_t number = 0;
    Clock seen{};
  };

  Mark& slot(std::int64_t mark) { return marks_[static_cast<std::size_t>(mark & (kMarks - 1))]; }

  c10::cuda::CUDAStream stream_;
  int clock_;
  std::int64_t last_ = 0;       // mark
  std::int64_t forgotten_ = 0;  // marks up to here are complete
  Clock seen_{};                // marks of other streams that this one has waited for, directly or not
  std::vector<Mark> marks_;
};

}  // namespace fsdp::cuda
