// Where a linear map's backward puts the gradient of its weight.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace fsdp {

// The product dy^T x of a weight (rows, columns) with dy (n, rows) and x (n, columns), straight into the packed
// gradients of the weight's unit where that is possible. Within one backward of one node it may be called several
// times; the products add up.
class WeightGradient {
 public:
  // In backward, on its thread.
  explicit WeightGradient(const at::Tensor& weight);
  void add(const at::Tensor& dy, const at::Tensor& x);
  // The product of part `part` of a weight (parts, rows, columns), each part once; n may be 0.
  void add_part(std::int64_t part, const at::Tensor& dy, const at::Tensor& x);
  // The whole product, computed by the caller.
  void add_product(const at::Tensor& product);
  // Whether products are kept, and added, in this dtype.
  [[nodiscard]] bool keeps(c10::ScalarType dtype) const { return !place_.defined() || place_.scalar_type() == dtype; }
  // The gradient that is to travel along the weight's edge; undefined when it is in its place already.
  [[nodiscard]] at::Tensor take();

 private:
  void write(at::Tensor place, const at::Tensor& dy, const at::Tensor& x) const;

  const at::Tensor weight_;
  at::Tensor place_;  // undefined: none, the value travels
  bool adds_ = false, used_ = false;
  at::Tensor value_;
};

}  // namespace fsdp
