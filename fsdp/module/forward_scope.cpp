#include "fsdp/module/forward_scope.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>

#include <memory>

#include "fsdp/module/backward_watch.h"
#include "fsdp/module/call.h"
#include "fsdp/module/fsdp_module.h"
#include "fsdp/module/hook_target.h"
#include "fsdp/module/recompute_state.h"
#include "fsdp/module/scheduler.h"

namespace fsdp {
namespace {

// Runs before the node that made an output: the unit's backward begins. Graphs outlive contexts, so no ownership.
class PreBackwardHook final : public torch::autograd::FunctionPreHook {
 public:
  explicit PreBackwardHook(std::weak_ptr<FsdpModule> unit, Scheduler& scheduler)
      : unit_(std::move(unit)), scheduler_(scheduler) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override {
    if (auto unit = unit_.lock()) scheduler_.pre_backward(*unit);
    return gradients;
  }

 private:
  std::weak_ptr<FsdpModule> unit_;
  Scheduler& scheduler_;  // lives as long as its units
};

}  // namespace

FsdpModule* find_unit(const torch::nn::Module& module) {
  const auto* target = dynamic_cast<const HookTarget*>(&module);
  return target == nullptr ? nullptr : target->unit();
}

ForwardScope::ForwardScope(FsdpModule& unit) : unit_(unit) {
  unit_.scheduler_.pre_forward(unit_);
  enclosing_ = backward_watch::enter(&unit_, unit_.weight_version_);
  first_node_ = backward_watch::next_number();
}

void ForwardScope::start() {
  unit_.scheduler_.start_forward(unit_);
  span_ = unit_.scheduler_.issue_compute_span(unit_.names_.forward_compute);
  range_ = unit_.scheduler_.begin_range(unit_.names_.forward_compute);
}

ForwardScope::~ForwardScope() {
  if (finished_) return;
  leave();
  unit_.scheduler_.abandon_forward(unit_);
}

void ForwardScope::leave() {
  if (range_ != 0) unit_.scheduler_.end_range(range_);
  backward_watch::enter(enclosing_, enclosing_ == nullptr ? 0 : enclosing_->weight_version_);
}

void ForwardScope::take_input(at::Tensor& input) {
  if (!input.defined() || !input.is_floating_point()) return;
  const auto& policy = unit_.options().mixed_precision;
  if (policy.param_dtype && policy.cast_forward_inputs && input.scalar_type() != *policy.param_dtype)
    input = input.to(*policy.param_dtype);
}

void ForwardScope::give_output(at::Tensor& output) {
  const auto& policy = unit_.options().mixed_precision;
  if (policy.output_dtype && output.defined() && output.is_floating_point() &&
      output.scalar_type() != *policy.output_dtype)
    output = output.to(*policy.output_dtype);
  watch_output(output);
}

void ForwardScope::give_output(const at::Tensor& output) { watch_output(output); }

void ForwardScope::watch_output(const at::Tensor& output) {
  if (!output.defined()) return;
  backward_expected_ |= recompute_state().tracks_later && output.is_floating_point();
  if (!output.requires_grad() || !at::GradMode::is_enabled()) return;
  const auto& node = output.grad_fn();
  if (node == nullptr) return;  // a leaf handed through: nothing of this unit is behind it
  node->add_tensor_pre_hook(std::make_unique<PreBackwardHook>(unit_.weak_from_this(), unit_.scheduler_));
  backward_expected_ = true;
}

void ForwardScope::finish() {
  finished_ = true;
  leave();
  if (span_ != nullptr) span_->end = unit_.scheduler_.compute_stream().now();
  unit_.scheduler_.post_forward(unit_, backward_expected_, first_node_);
}

}  // namespace fsdp
