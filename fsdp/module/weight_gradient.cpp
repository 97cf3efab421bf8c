#include "fsdp/module/weight_gradient.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>
#include <torch/csrc/autograd/graph_task.h>

#include "fsdp/module/fsdp_module.h"
#include "fsdp/module/grad_accumulator.h"
#include "fsdp/module/parameter_group.h"

namespace fsdp {

WeightGradient::WeightGradient(const at::Tensor& weight) {
  // autograd::grad asks for chosen gradients by value; only a plain backward delivers into the accumulator.
  const auto* chosen = torch::autograd::get_current_graph_task_exec_info();
  const bool plain = (chosen == nullptr || chosen->empty()) && !at::GradMode::is_enabled();
  GradAccumulator* accumulator = plain ? GradAccumulator::find(weight) : nullptr;
  if (accumulator == nullptr || accumulator->group() == nullptr) return;
  accumulator->group()->unit().open_window();
  const auto place = accumulator->group()->claim_gradient(accumulator->index(), /*wide_products=*/weight.is_cuda());
  place_ = place.tensor;
  adds_ = place.add;
}

void WeightGradient::add(const at::Tensor& dy, const at::Tensor& x) {
  if (!place_.defined()) {
    const at::Tensor product = at::mm(dy.t(), x);
    value_ = value_.defined() ? value_ + product : product;
    return;
  }
  const bool same = place_.scalar_type() == x.scalar_type();
  if (adds_ && same)
    at::addmm_out(place_, place_, dy.t(), x);
  else if (adds_)
    at::addmm_out(place_, place_, dy.t(), x, place_.scalar_type());
  else if (same)
    at::mm_out(place_, dy.t(), x);
  else
    at::mm_out(place_, dy.t(), x, place_.scalar_type());
  adds_ = true;
}

at::Tensor WeightGradient::take() {
  if (place_.defined() && !adds_) place_.zero_();  // claimed, and there was nothing to add
  return std::move(value_);
}

}  // namespace fsdp
