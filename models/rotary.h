// Rotary position embedding (Su et al., arXiv 2104.09864), halves rotated as in Llama.
//
// The tables are neither parameters nor buffers: they follow from two numbers and are made when first needed, per
// device and dtype. One table serves all blocks of a model; one thread uses it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace fsdp::models {

class RotaryTable {
 public:
  RotaryTable(std::int64_t head_width, double theta) : head_width_(head_width), theta_(theta) {}

  // x: (batch, position, head, head_width); position p is rotated by p times each pair's frequency. On a GPU one kernel
  // forward and one backward, rounded once; no gradients of gradients there.
  [[nodiscard]] at::Tensor rotate(const at::Tensor& x);

 private:
  struct Entry {
    c10::Device device;
    c10::ScalarType dtype;
    at::Tensor cosine, sine;  // (position, 1, head_width); the sine of the first half is negative
  };
  const Entry& find(const at::Tensor& x);

  std::int64_t head_width_;
  double theta_;
  std::vector<Entry> entries_;  // one a device and dtype, for the longest text so far
};

}  // namespace fsdp::models
