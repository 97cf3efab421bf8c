// Packs the gradients of one window into a flat buffer on a device, by as few kernels as possible.
//
// Small gradients wait for each other and are written by one kernel when the window closes; large ones at once, so that
// their memory is free before the next one comes. What is written never is -0, the mark of "no rank used it"
// (dbuffer/accumulate.h); what nobody wrote is filled with it. All on the stream that computes. Host thread of the rank
// only.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "fsdp/runtime/kernels.h"

namespace fsdp {

class GradientPacking {
 public:
  GradientPacking(Kernels& kernels, std::size_t parameters) : kernels_(kernels), packed_(parameters) {}

  void begin_window();
  void clear(void* to, std::int64_t count);
  // Stores or adds one gradient; `destination` is parameter `index`'s place.
  void store(int index, const at::Tensor& destination, const at::Tensor& gradient, bool overwrite);
  // A producer is about to write, or add to, the place of `index` itself.
  void hand_over(int index, c10::ScalarType dtype);
  [[nodiscard]] bool packed(int index) const { return packed_[index] != 0; }  // stored here: holds no -0
  // -0 becomes +0 in the first element of each part of a gradient that a producer wrote: at 0, `first_edge`, and every
  // `edge_distance` from there.
  void mark_used(void* to, std::int64_t count, std::int64_t first_edge, std::int64_t edge_distance);
  void fill_unused(void* to, std::int64_t count);
  // Launches what waits; `dtype` is the buffer's.
  void run(c10::ScalarType dtype);
  void abandon();

 private:
  Kernels& kernels_;
  std::vector<PackEntry> entries_;
  std::vector<at::Tensor> reads_;     // gradients that entries refer to
  std::vector<std::uint8_t> packed_;  // [parameter]
};

}  // namespace fsdp
