#include "fsdp/moe/router.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/topk.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include "fsdp/base/check.h"

namespace fsdp::moe {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct AttachLoss : torch::autograd::Function<AttachLoss> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& loss, double scale) {
    context->saved_data["scale"] = scale;
    context->save_for_backward({loss});
    return x.view_as(x);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const at::Tensor loss = context->get_saved_variables()[0];
    return {gradients[0], at::full_like(loss, context->saved_data["scale"].toDouble()), at::Tensor()};
  }
};

}  // namespace

Routing route(const at::Tensor& logits, const RouterOptions& options, const at::Tensor& bias) {
  FSDP_CHECK(logits.dim() == 2 && logits.size(1) == options.experts, UsageError,
             "route: expected logits (tokens, {}), got {} dimensions with {} in the last", options.experts,
             logits.dim(), logits.dim() == 0 ? 0 : logits.size(-1));
  FSDP_CHECK(options.top_k >= 1 && options.top_k <= options.experts, UsageError,
             "route: top_k is {}, expected 1 to {}, the number of experts", options.top_k, options.experts);
  const at::Tensor probabilities = at::softmax(logits.to(at::kFloat), -1);
  Routing routing;
  {
    at::NoGradGuard no_grad;
    const at::Tensor eligible = bias.defined() ? probabilities + bias : probabilities;
    routing.experts = std::get<1>(at::topk(eligible, options.top_k, -1));
    const at::Tensor chosen = routing.experts.reshape({-1});  // bincount would wait for the device
    routing.load = at::zeros({options.experts}, chosen.options()).scatter_add_(0, chosen, at::ones_like(chosen));
  }
  routing.weights = probabilities.gather(-1, routing.experts);
  if (options.normalize) routing.weights = routing.weights / routing.weights.sum(-1, true);
  if (options.auxiliary_loss != 0) {
    const double assignments = static_cast<double>(logits.size(0) * options.top_k);
    const at::Tensor share = routing.load.to(at::kFloat) / assignments;
    routing.auxiliary_loss =
        (share * probabilities.mean(0)).sum() * (options.auxiliary_loss * static_cast<double>(options.experts));
  }
  return routing;
}

void update_expert_bias(at::Tensor bias, const at::Tensor& load, double rate) {
  at::NoGradGuard no_grad;
  const at::Tensor counts = load.to(bias.scalar_type());
  bias.add_((counts.mean() - counts).sign(), rate);
}

at::Tensor attach_loss(const at::Tensor& x, const at::Tensor& loss, double scale) {
  return AttachLoss::apply(x, loss, scale);
}

}  // namespace fsdp::moe
