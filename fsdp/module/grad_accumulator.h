// Where autograd delivers the gradient of one managed parameter, in place of LibTorch's AccumulateGrad.
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>

#include <memory>
#include <vector>

namespace fsdp {

class FsdpParameterGroup;

class GradAccumulator final : public torch::autograd::Node {
 public:
  // Highest sequence number, as AccumulateGrad: with an ordinary one no gradient would arrive before the whole backward
  // is done, and no reduction could hide.
  GradAccumulator(FsdpParameterGroup& group, int index, at::Tensor parameter);

  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;
  [[nodiscard]] std::string name() const override { return "fsdp::GradAccumulator"; }

  // Autograd runs a node on the stream that was current when its input was described: describes it anew.
  void follow_compute_stream();

  // The user's hooks on the parameter run as they would on AccumulateGrad.
  std::vector<std::unique_ptr<torch::autograd::FunctionPreHook>>& tensor_pre_hooks() noexcept override;
  std::unique_ptr<torch::autograd::PostAccumulateGradHook>& tensor_post_acc_grad_hooks() const noexcept override;

  [[nodiscard]] FsdpParameterGroup* group() const { return group_; }
  [[nodiscard]] int index() const { return index_; }
  void detach_from_group() { group_ = nullptr; }  // the context is going; a graph may still hold this node

  // The accumulator of a parameter that a context manages, or null.
  static GradAccumulator* find(const at::Tensor& parameter);

 private:
  FsdpParameterGroup* group_;
  int index_;
  at::Tensor parameter_;
};

}  // namespace fsdp
