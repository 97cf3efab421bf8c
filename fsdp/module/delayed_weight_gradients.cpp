#include "fsdp/module/delayed_weight_gradients.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/module/fsdp_module.h"
#include "fsdp/module/grad_accumulator.h"
#include "fsdp/module/parameter_group.h"
#include "fsdp/module/weight_gradient.h"

namespace fsdp {
namespace {

thread_local const DelayedWeightGradients* current_owner = nullptr;

}  // namespace

DelayedWeightGradients::DelayedWeightGradients() : queue_(std::make_shared<Queue>()) {}

DelayedWeightGradients::Scope::Scope(const DelayedWeightGradients& owner)
    : previous_(std::exchange(current_owner, &owner)) {}
DelayedWeightGradients::Scope::~Scope() { current_owner = previous_; }

std::shared_ptr<DelayedWeightGradients::Queue> DelayedWeightGradients::current(const at::Tensor& weight) {
  if (current_owner == nullptr) return nullptr;
  const FsdpModule& unit = GradAccumulator::find(weight)->group()->unit();
  FSDP_CHECK(
      !unit.options().register_hooks, UsageError,
      "DelayedWeightGradients: unit \"{}\" is not caller-driven, so the end of a backward would reduce it without "
      "the delayed gradients: set UnitOptions::register_hooks to false",
      unit.name());
  FSDP_CHECK(
      torch::autograd::impl::hooks(weight).empty() && torch::autograd::impl::post_acc_grad_hooks(weight) == nullptr,
      UsageError, "DelayedWeightGradients: a weight of unit \"{}\" has hooks, which a delayed gradient would not run",
      unit.name());
  return current_owner->queue_;
}

void DelayedWeightGradients::leave(Queue& queue, Product product) {
  FSDP_CHECK(!at::GradMode::is_enabled(), UsageError,
             "a backward with create_graph reached a linear map whose weight gradient is delayed: run its forward "
             "outside of the scope of DelayedWeightGradients");
  const auto* chosen = torch::autograd::get_current_graph_task_exec_info();
  if (chosen != nullptr && !chosen->empty()) return;  // gradients for chosen inputs only
  queue.push_back(std::move(product));
}

std::vector<at::Tensor> DelayedWeightGradients::run() {
  at::NoGradGuard no_grad;
  std::vector<at::Tensor> read;
  while (!queue_->empty()) {
    const Product product = std::move(queue_->front());
    queue_->pop_front();
    WeightGradient gradient(product.weight);
    product.add(gradient, product.dy, product.x);
    (*product.accumulator)({gradient.take()});
    read.insert(read.end(), {product.dy, product.x});
  }
  return read;
}

std::size_t DelayedWeightGradients::pending() const { return queue_->size(); }
void DelayedWeightGradients::drop() { queue_->clear(); }

}  // namespace fsdp
