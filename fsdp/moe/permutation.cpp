#include "fsdp/moe/permutation.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/argsort.h>
#include <ATen/ops/div.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/custom_function.h>

namespace fsdp::moe {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Rows of x repeated and sorted. A plain index_select would add up its gradients in any order.
struct Permute : torch::autograd::Function<Permute> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& order,
                            const at::Tensor& inverse, std::int64_t top_k) {
    context->saved_data["top_k"] = top_k;
    context->save_for_backward({inverse});
    return x.index_select(0, top_k == 1 ? order : at::div(order, top_k, "floor"));
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const std::int64_t top_k = context->saved_data["top_k"].toInt();
    const at::Tensor rows = gradients[0].index_select(0, context->get_saved_variables()[0]);
    at::Tensor dx = rows;
    if (top_k > 1) dx = rows.view({rows.size(0) / top_k, top_k, -1}).sum(1).view({rows.size(0) / top_k, rows.size(1)});
    return {dx, {}, {}, {}};
  }
};

// The rows named by a permutation; its inverse in backward.
struct Reorder : torch::autograd::Function<Reorder> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& index,
                            const at::Tensor& inverse) {
    context->save_for_backward({inverse});
    return x.index_select(0, index);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    return {gradients[0].index_select(0, context->get_saved_variables()[0]), {}, {}};
  }
};

}  // namespace

Permutation sort_by_expert(const at::Tensor& experts) {
  at::NoGradGuard no_grad;
  Permutation permutation;
  permutation.top_k = experts.size(1);
  permutation.order = at::argsort(experts.reshape({-1}), /*stable=*/true, /*dim=*/0, /*descending=*/false);
  permutation.inverse = at::empty_like(permutation.order);
  permutation.inverse.scatter_(0, permutation.order,
                               at::arange(permutation.order.size(0), permutation.order.options()));
  return permutation;
}

at::Tensor permute(const at::Tensor& x, const Permutation& p) { return Permute::apply(x, p.order, p.inverse, p.top_k); }

at::Tensor permute_weights(const at::Tensor& weights, const Permutation& p) {
  return Reorder::apply(weights.reshape({-1}), p.order, p.inverse);
}

at::Tensor unpermute(const at::Tensor& rows, const Permutation& p) {
  const at::Tensor sorted = Reorder::apply(rows, p.inverse, p.order);
  if (p.top_k == 1) return sorted;
  return sorted.view({rows.size(0) / p.top_k, p.top_k, rows.size(1)}).sum(1);
}

}  // namespace fsdp::moe
