#include "fsdp/module/weight_gradient.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/graph_task.h>

#include "fsdp/module/fsdp_module.h"
#include "fsdp/module/grad_accumulator.h"
#include "fsdp/module/parameter_group.h"

namespace fsdp {

WeightGradient::WeightGradient(const at::Tensor& weight) : weight_(weight) {
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

void WeightGradient::write(at::Tensor place, const at::Tensor& dy, const at::Tensor& x) const {
  const bool same = place.scalar_type() == x.scalar_type();
  if (adds_ && same)
    at::addmm_out(place, place, dy.t(), x);
  else if (adds_)
    at::addmm_out(place, place, dy.t(), x, place.scalar_type());
  else if (same)
    at::mm_out(place, dy.t(), x);
  else
    at::mm_out(place, dy.t(), x, place.scalar_type());
}

void WeightGradient::add(const at::Tensor& dy, const at::Tensor& x) {
  used_ = true;
  if (!place_.defined()) {
    const at::Tensor product = at::mm(dy.t(), x);
    value_ = value_.defined() ? value_ + product : product;
    return;
  }
  write(place_, dy, x);
  adds_ = true;
}

void WeightGradient::add_part(std::int64_t part, const at::Tensor& dy, const at::Tensor& x) {
  used_ = true;
  if (!place_.defined()) {
    if (!value_.defined()) value_ = at::zeros_like(weight_, at::TensorOptions().dtype(x.scalar_type()));
    if (x.size(0) > 0) value_.select(0, part).copy_(at::mm(dy.t(), x));
    return;
  }
  if (x.size(0) > 0)
    write(place_.select(0, part), dy, x);
  else if (!adds_)
    place_.select(0, part).zero_();
}

void WeightGradient::add_product(const at::Tensor& product) {
  used_ = true;
  if (!place_.defined())
    value_ = product;
  else if (adds_)
    place_.add_(product);
  else
    place_.copy_(product);
}

at::Tensor WeightGradient::take() {
  if (place_.defined() && !adds_ && !used_) place_.zero_();  // claimed, and there was nothing to add
  return std::move(value_);
}

}  // namespace fsdp
