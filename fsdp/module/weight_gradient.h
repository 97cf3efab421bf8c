// Where a linear map's backward puts the gradient of its weight.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace fsdp {

// The product dy^T x of a weight (rows, columns) with dy (n, rows) and x (n, columns), straight into the packed
// gradients of the weight's unit where that is possible. Within one backward of one node it may be called several
// times; the products add up.
class WeightGradient {
 public:
  // In backward, on its thread.
  explicit WeightGradient(const at::Tensor& weight);
  void add(const at::Tensor& dy, const at::Tensor& x);
  // The gradient that is to travel along the weight's edge; undefined when it is in its place already.
  [[nodiscard]] at::Tensor take();

 private:
  at::Tensor place_;  // undefined: none, the value travels
  bool adds_ = false;
  at::Tensor value_;
};

}  // namespace fsdp
