#include "fsdp/optim/clip_grad_norm.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
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
  for (const auto& name : group.unit().options().partitioned_axes) axes.push_back(mesh.axis_index(name));
  return axes;
}

// Norms of a group's gradients on this rank, one a piece. Units that are still being reduced come last, in their order,
// so that those before them are read meanwhile; the values do not depend on it.
std::map<const FsdpParameterGroup*, std::vector<at::Tensor>> norms_of_pieces(FsdpContext& context,
                                                                             c10::ScalarType dtype) {
  const auto waiting = context.units_being_reduced();
  std::map<const FsdpParameterGroup*, std::vector<at::Tensor>> norms;
  std::vector<at::Tensor> pieces;
  std::vector<const FsdpParameterGroup*> owners;  // [piece]
  const auto flush = [&] {
    if (pieces.empty()) return;
    const auto some = at::_foreach_norm(pieces, 2, dtype);
    for (std::size_t i = 0; i < some.size(); ++i) norms[owners[i]].push_back(some[i]);
    pieces.clear();
    owners.clear();
  };
  const auto add = [&](FsdpParameterGroup& group) {
    norms.try_emplace(&group);
    if (!group.trainable()) return;
    for (at::Tensor& gradient : group.defined_gradients()) {
      pieces.push_back(std::move(gradient));
      owners.push_back(&group);
    }
  };
  for (FsdpParameterGroup* group : context.groups()) {
    if (std::find(waiting.begin(), waiting.end(), &group->unit()) == waiting.end()) add(*group);
  }
  flush();
  for (FsdpModule* unit : waiting) {
    context.wait_for_gradients(*unit);
    for (const auto& group : unit->groups()) add(*group);
    flush();
  }
  return norms;
}

}  // namespace

at::Tensor grad_norm(FsdpContext& context) {
  context.check_gradients_reduced("grad_norm");
  at::NoGradGuard no_grad;
  const DeviceMesh& mesh = context.mesh();
  const auto device = mesh.runtime()->device();
  const auto wide = at::TensorOptions().device(device).dtype(device.is_cuda() ? at::kFloat : at::kDouble);
  const auto local_norms = norms_of_pieces(context, wide.dtype().toScalarType());
  std::map<std::vector<int>, at::Tensor> sums;                // axes of the sum -> squares of this rank's elements
  std::map<std::vector<int>, std::vector<at::Tensor>> norms;  // of the pieces, in the order of the groups
  for (const FsdpParameterGroup* group : context.groups()) {
    if (!group->trainable()) continue;
    // Every rank makes an entry for the same axes, whether or not it holds gradients: the collectives must agree.
    const auto axes = split_axes(*group, mesh);
    sums.try_emplace(axes, at::zeros({}, wide));
    const auto& some = local_norms.at(group);
    norms[axes].insert(norms[axes].end(), some.begin(), some.end());
  }
  for (const auto& [axes, some] : norms) {
    if (!some.empty()) sums[axes].add_(at::stack(some).square().sum());
  }
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
