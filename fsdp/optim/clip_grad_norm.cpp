#include "fsdp/optim/clip_grad_norm.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/empty.h>
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
#include "fsdp/runtime/kernels.h"

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
  std::sort(axes.begin(), axes.end());
  return axes;
}

using Sums = std::map<std::vector<int>, at::Tensor>;  // axes of the sum -> squares of this rank's elements

// Ranks hold units of the same kinds, so each makes the same collectives.
at::Tensor total_of_equal_units(Sums& sums, const DeviceMesh& mesh, const at::TensorOptions& wide) {
  const Stream stream = mesh.runtime()->compute_stream();
  at::Tensor total = at::zeros({}, wide);
  for (auto& [axes, sum] : sums) {
    void* data = sum.is_meta() ? nullptr : sum.mutable_data_ptr();
    for (int axis : axes) {
      mesh.communicator(axis, Use::reduce)
          .all_reduce(data, data, Elements(1), sum.scalar_type(), ReduceOp::sum, stream, "FSDP:grad_norm");
    }
    total.add_(sum);
  }
  return total;
}

// Ranks may hold units of different kinds: stages of a pipeline, of which one has experts and another none. One sum for
// every set of axes there can be, and over each axis those that contain it.
at::Tensor total_of_all_sets(const Sums& sums, const DeviceMesh& mesh, const at::TensorOptions& wide) {
  const std::int64_t sets = std::int64_t{1} << mesh.axis_count();
  at::Tensor all = at::zeros({sets}, wide);
  for (const auto& [axes, sum] : sums) {
    std::int64_t set = 0;
    for (int axis : axes) set |= std::int64_t{1} << axis;
    all[set].add_(sum);
  }
  const Stream stream = mesh.runtime()->compute_stream();
  for (int axis = 0; axis < mesh.axis_count(); ++axis) {
    if (mesh.axis(axis).size == 1) continue;
    // (sets above, with and without the axis, sets below)
    const at::Tensor with = all.view({sets >> (axis + 1), 2, std::int64_t{1} << axis}).select(1, 1);
    at::Tensor some = with.contiguous();
    void* data = some.is_meta() ? nullptr : some.mutable_data_ptr();
    mesh.communicator(axis, Use::reduce)
        .all_reduce(data, data, Elements(some.numel()), some.scalar_type(), ReduceOp::sum, stream, "FSDP:grad_norm");
    with.copy_(some);
  }
  return all.sum();
}

// Of dense pieces, in one reading of them.
std::vector<at::Tensor> norms_by_kernel(const std::vector<at::Tensor>& gradients, Kernels& kernels) {
  std::vector<NormPiece> pieces;
  for (const auto& g : gradients) pieces.push_back({g.const_data_ptr(), g.numel(), g.scalar_type()});
  const auto floats = gradients.front().options().dtype(at::kFloat);
  const at::Tensor scratch = at::empty({kernels.norm_scratch(pieces.size())}, floats);
  const at::Tensor norms = at::empty({static_cast<std::int64_t>(pieces.size())}, floats);
  kernels.norms(pieces, scratch.mutable_data_ptr<float>(), norms.mutable_data_ptr<float>());
  return norms.unbind();
}

// Norms of a group's gradients on this rank, one a piece. Units that are still being reduced come last, in their order,
// so that those before them are read meanwhile; the values do not depend on it.
std::map<const FsdpParameterGroup*, std::vector<at::Tensor>> norms_of_pieces(FsdpContext& context,
                                                                             c10::ScalarType dtype) {
  const auto waiting = context.units_being_reduced();
  std::map<const FsdpParameterGroup*, std::vector<at::Tensor>> norms;
  std::vector<at::Tensor> pieces;
  std::vector<const FsdpParameterGroup*> owners;  // [piece]
  Kernels* kernels = context.mesh().runtime()->kernels();
  const auto flush = [&] {
    if (pieces.empty()) return;
    const bool by_kernel = kernels != nullptr && std::ranges::all_of(pieces, [](const at::Tensor& g) {
                             return g.is_contiguous() && g.scalar_type() != at::kDouble;
                           });
    const auto some = by_kernel ? norms_by_kernel(pieces, *kernels) : at::_foreach_norm(pieces, 2, dtype);
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
  Sums sums;
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
  const bool partitioned = std::any_of(context.units().begin(), context.units().end(),
                                       [](const auto& unit) { return !unit->options().partitioned_axes.empty(); });
  const at::Tensor total = partitioned ? total_of_all_sets(sums, mesh, wide) : total_of_equal_units(sums, mesh, wide);
  return total.sqrt().to(at::kFloat);
}

at::Tensor clip_scale(const at::Tensor& norm, double max_norm) {
  FSDP_CHECK(max_norm > 0, UsageError, "clipping: max_norm is {}, expected more than 0", max_norm);
  at::NoGradGuard no_grad;
  const at::Tensor wanted = at::clamp((norm + 1e-6).reciprocal().mul(max_norm), {}, 1.0);
  return at::where(at::isfinite(norm), wanted, at::ones_like(norm));
}

void scale_gradients(FsdpContext& context, const at::Tensor& scale) {
  at::NoGradGuard no_grad;
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
}

at::Tensor clip_grad_norm_(FsdpContext& context, double max_norm) {
  FSDP_CHECK(max_norm > 0, UsageError, "clip_grad_norm_: max_norm is {}, expected more than 0", max_norm);
  at::Tensor norm = grad_norm(context);
  scale_gradients(context, clip_scale(norm, max_norm));
  return norm;
}

}  // namespace fsdp
