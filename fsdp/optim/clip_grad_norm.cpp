#include "fsdp/optim/clip_grad_norm.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/dot.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <map>
#include <utility>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/dbuffer/dbuffer.h"

namespace fsdp {
namespace {

// Mesh axes over which a group's gradient is split: their ranks hold different elements, all others equal ones.
std::vector<int> split_axes(const FsdpParameterGroup& group, const DeviceMesh& mesh) {
  const auto& names = group.unit().options().placements.axes;
  std::vector<int> axes;
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (group.optimizer_placements()[i] == Placement::flat) axes.push_back(mesh.axis_index(names[i]));
  }
  return axes;
}

}  // namespace

at::Tensor grad_norm(FsdpContext& context) {
  context.check_gradients_reduced("grad_norm");
  at::NoGradGuard no_grad;
  const DeviceMesh& mesh = context.mesh();
  const auto device = mesh.runtime()->device();
  const auto wide = at::TensorOptions().device(device).dtype(device.is_cuda() ? at::kFloat : at::kDouble);
  std::map<std::vector<int>, at::Tensor> sums;                 // axes of the sum -> squares of this rank's elements
  std::map<std::vector<int>, std::vector<at::Tensor>> pieces;  // on a GPU: gradients, summed by few kernels
  for (FsdpParameterGroup* group : context.groups()) {
    if (!group->trainable()) continue;
    // Every rank makes an entry for the same axes, whether or not it holds gradients: the collectives must agree.
    const auto axes = split_axes(*group, mesh);
    at::Tensor& sum = sums.try_emplace(axes, at::zeros({}, wide)).first->second;
    for (const at::Tensor& gradient : group->defined_gradients()) {
      if (device.is_cuda()) {
        pieces[axes].push_back(gradient);
        continue;
      }
      const at::Tensor wide_gradient = gradient.to(sum.scalar_type());
      sum.add_(at::dot(wide_gradient, wide_gradient));
    }
  }
  for (const auto& [axes, gradients] : pieces)
    sums[axes].add_(at::stack(at::_foreach_norm(gradients, 2, at::kFloat)).square().sum());
  const Stream stream = mesh.runtime()->compute_stream();
  at::Tensor total = at::zeros({}, wide);
  for (auto& [axes, sum] : sums) {
    void* data = device.is_meta() ? nullptr : sum.mutable_data_ptr();
    for (int axis : axes) {
      mesh.communicator(axis, Use::reduce)
          .all_reduce(data, data, Elements(1), sum.scalar_type(), ReduceOp::sum, stream, "FSDP:grad_norm");
    }
    total.add_(sum);
  }
  return total.sqrt().to(at::kFloat);
}

at::Tensor clip_grad_norm_(FsdpContext& context, double max_norm) {
  FSDP_CHECK(max_norm > 0, UsageError, "clip_grad_norm_: max_norm is {}, expected more than 0", max_norm);
  at::Tensor norm = grad_norm(context);
  at::NoGradGuard no_grad;
  const at::Tensor wanted = at::clamp((norm + 1e-6).reciprocal().mul(max_norm), {}, 1.0);
  const at::Tensor scale = at::where(at::isfinite(norm), wanted, at::ones_like(norm));
  std::vector<at::Tensor> gradients;
  for (FsdpParameterGroup* group : context.groups()) {
    if (!group->trainable()) continue;
    for (at::Tensor& gradient : group->defined_gradients()) gradients.push_back(std::move(gradient));
  }
  if (scale.is_cuda() && !gradients.empty()) {
    at::_foreach_mul_(gradients, scale);
  } else {
    for (at::Tensor& gradient : gradients) gradient.mul_(scale);
  }
  return norm;
}

}  // namespace fsdp
