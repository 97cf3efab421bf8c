#include "fsdp/module/grad_accumulator.h"

#include <torch/csrc/autograd/variable.h>

#include <limits>

#include "fsdp/base/check.h"
#include "fsdp/module/fsdp_module.h"
#include "fsdp/module/parameter_group.h"

namespace fsdp {

GradAccumulator::GradAccumulator(FsdpParameterGroup& group, int index, at::Tensor parameter)
    : Node(std::numeric_limits<std::uint64_t>::max()), group_(&group), index_(index), parameter_(std::move(parameter)) {
  add_input_metadata(parameter_);
}

torch::autograd::variable_list GradAccumulator::apply(torch::autograd::variable_list&& gradients) {
  FSDP_CHECK(group_ != nullptr, UsageError,
             "backward reached a parameter whose FsdpContext was destroyed: keep the context until its last backward");
  FSDP_CHECK(
      group_->trainable(), UsageError,
      "parameter \"{}\" of unit \"{}\" received a gradient, but it was frozen when the last forward began: change "
      "requires_grad before a forward",
      group_->parameters()[index_].name, group_->unit().name());
  group_->unit().open_window();
  const bool expected = group_->receive(index_, gradients[0]);
  gradients[0].reset();  // its memory is free before the next node runs
  group_->unit().gradient_arrived(expected);
  return {};
}

void GradAccumulator::follow_compute_stream() {
  clear_input_metadata();
  add_input_metadata(parameter_);
}

std::vector<std::unique_ptr<torch::autograd::FunctionPreHook>>& GradAccumulator::tensor_pre_hooks() noexcept {
  return torch::autograd::impl::hooks(parameter_);
}

std::unique_ptr<torch::autograd::PostAccumulateGradHook>& GradAccumulator::tensor_post_acc_grad_hooks() const noexcept {
  return torch::autograd::impl::post_acc_grad_hooks(parameter_);
}

GradAccumulator* GradAccumulator::find(const at::Tensor& parameter) {
  if (!parameter.requires_grad() || !parameter.is_leaf()) return nullptr;
  return dynamic_cast<GradAccumulator*>(torch::autograd::impl::try_get_grad_accumulator(parameter).get());
}

}  // namespace fsdp
