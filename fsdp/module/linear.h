// A linear layer whose backward is one node that writes its weight gradient straight into the unit's packed gradients.
//
// With plain at::linear every weight gradient is made in a temporary and copied; its backward is five nodes. Here it is
// one, and the product goes to its place. Values are equal bit for bit. Falls back to at::linear when the weight is not
// managed by a context, and to the differentiable path under create_graph.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>

#include <memory>

namespace fsdp {

// x (..., in) times weight (out, in) transposed, plus bias (out) or undefined.
[[nodiscard]] at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias = {});

namespace nn {

// As torch::nn::Linear: parameters "weight" and "bias", same initialisation, same options.
class LinearImpl : public torch::nn::LinearImpl {
 public:
  using torch::nn::LinearImpl::LinearImpl;
  // Over the parameter tensors of an existing layer, which stays usable.
  explicit LinearImpl(const torch::nn::LinearImpl& other);

  at::Tensor forward(const at::Tensor& x);
};
TORCH_MODULE(Linear);

// An fsdp Linear over the same parameters, to put in the old layer's place before fully_shard:
//   fc = replace_module("fc", fsdp::nn::convert(old_fc));
[[nodiscard]] Linear convert(const torch::nn::Linear& linear);

}  // namespace nn

}  // namespace fsdp
