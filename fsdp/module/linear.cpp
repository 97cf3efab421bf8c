#include "fsdp/module/linear.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>
#include <vector>

#include "fsdp/module/delayed_weight_gradients.h"
#include "fsdp/module/grad_accumulator.h"
#include "fsdp/module/weight_gradient.h"

namespace fsdp {
namespace {

using torch::autograd::variable_list;

// Edges: 0 input, 1 weight, 2 bias. The weight's edge leads to its GradAccumulator, which counts the gradient as
// arrived even when the value was written in place and nothing travels along the edge. A delayed weight has no edge:
// its gradient must not count before it exists.
class LinearBackward final : public torch::autograd::Node {
 public:
  LinearBackward(const at::Tensor& x, const at::Tensor& weight, std::shared_ptr<DelayedWeightGradients::Queue> later)
      : x_(x, false),
        weight_(weight, false),
        later_(std::move(later)),
        columns_(weight.size(1)),
        rows_(weight.size(0)) {
    if (later_) accumulator_ = torch::autograd::impl::grad_accumulator(weight);
  }

  [[nodiscard]] std::string name() const override { return "fsdp::LinearBackward"; }

  variable_list apply(variable_list&& gradients) override {
    variable_list result(num_outputs());
    const at::Tensor& dy = gradients[0];
    if (!dy.defined()) return result;
    const at::Tensor x = x_.unpack();
    const at::Tensor weight = weight_.unpack();
    const at::Tensor dy2 = dy.reshape({-1, rows_});
    const at::Tensor x2 = x.reshape({-1, columns_});
    // Under create_graph these are differentiable products; otherwise grad mode is off here.
    if (task_should_compute_output(0)) result[0] = at::mm(dy2, weight).view(x.sizes());
    if (task_should_compute_output(1)) {
      WeightGradient gradient(weight);
      gradient.add(dy2, x2);
      result[1] = gradient.take();
    }
    if (later_) {
      DelayedWeightGradients::leave(
          *later_, {accumulator_, weight, dy2, x2,
                    [](WeightGradient& gradient, const auto& dy, const auto& x) { gradient.add(dy, x); }});
    }
    if (num_outputs() > 2 && task_should_compute_output(2)) result[2] = dy2.sum(0);
    return result;
  }

  void release_variables() override {
    x_.reset_data();
    weight_.reset_data();
  }

 private:
  torch::autograd::SavedVariable x_, weight_;
  const std::shared_ptr<DelayedWeightGradients::Queue> later_;  // null: the weight gradient is computed here
  std::shared_ptr<torch::autograd::Node> accumulator_;
  std::int64_t columns_, rows_;
};

}  // namespace

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  const bool tracked = at::GradMode::is_enabled() && GradAccumulator::find(weight) != nullptr;
  if (!tracked || x.dim() == 0 || weight.dim() != 2 || x.size(-1) != weight.size(1)) return at::linear(x, weight, bias);
  at::Tensor y;
  {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    y = at::linear(x, weight, bias);
  }
  auto later = DelayedWeightGradients::current(weight);
  const bool delayed = later != nullptr;
  auto node = std::make_shared<LinearBackward>(x, weight, std::move(later));
  torch::autograd::edge_list edges;
  edges.push_back(x.requires_grad() ? torch::autograd::impl::gradient_edge(x) : torch::autograd::Edge());
  edges.push_back(delayed ? torch::autograd::Edge() : torch::autograd::impl::gradient_edge(weight));
  if (bias.defined())
    edges.push_back(bias.requires_grad() ? torch::autograd::impl::gradient_edge(bias) : torch::autograd::Edge());
  node->set_next_edges(std::move(edges));
  torch::autograd::set_history(y, node);
  return y;
}

namespace nn {

LinearImpl::LinearImpl(const torch::nn::LinearImpl& other)
    : torch::nn::LinearImpl(torch::nn::LinearOptions(1, 1).bias(other.bias.defined())) {
  options = other.options;
  weight = parameters_["weight"] = other.weight;
  if (other.bias.defined()) bias = parameters_["bias"] = other.bias;
}

at::Tensor LinearImpl::forward(const at::Tensor& x) { return fsdp::linear(x, weight, bias); }

Linear convert(const torch::nn::Linear& linear) { return Linear(std::make_shared<LinearImpl>(*linear)); }

}  // namespace nn

}  // namespace fsdp
