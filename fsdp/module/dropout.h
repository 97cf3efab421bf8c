// Dropout whose random numbers are the rank's own (mesh/rank_generator.h), so that ranks that are threads draw
// independently of each other and fsdp::recompute repeats what was drawn.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

namespace fsdp {

// Zeroes each element with probability `p`, scales the others by 1 / (1 - p). Identity unless `training`.
[[nodiscard]] at::Tensor dropout(const at::Tensor& x, double p, bool training);

namespace nn {

// As torch::nn::Dropout.
class DropoutImpl : public torch::nn::Module {
 public:
  explicit DropoutImpl(double p = 0.5);
  at::Tensor forward(const at::Tensor& x);

 private:
  double p_;
};
TORCH_MODULE(Dropout);

}  // namespace nn
}  // namespace fsdp
