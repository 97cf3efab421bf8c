#include "fsdp/mesh/device_mesh.h"

#include "fsdp/base/check.h"

namespace fsdp {
namespace {

std::string describe_axes(const std::vector<MeshAxis>& axes) {
  std::string text;
  for (const auto& axis : axes) text += fmt::format("{}{}={}", text.empty() ? "" : " x ", axis.name, axis.size);
  return text;
}

void check_names(const std::vector<MeshAxis>& axes) {
  FSDP_CHECK(!axes.empty(), UsageError, "a mesh needs at least one axis");
  for (std::size_t i = 0; i < axes.size(); ++i) {
    FSDP_CHECK(!axes[i].name.empty(), UsageError, "axis {} of the mesh {} has no name", i, describe_axes(axes));
    for (std::size_t j = 0; j < i; ++j) {
      FSDP_CHECK(axes[i].name != axes[j].name, UsageError, "the mesh {} has two axes named \"{}\"", describe_axes(axes),
                 axes[i].name);
    }
  }
}

}  // namespace

DeviceMesh::DeviceMesh(World world, std::vector<MeshAxis> axes) {
  check_names(axes);
  std::int64_t product = 1;
  for (const auto& axis : axes) {
    FSDP_CHECK(axis.size >= 1, UsageError, "axis \"{}\" of the mesh has size {}, expected at least 1", axis.name,
               axis.size);
    product *= axis.size;
    FSDP_CHECK(product <= world.size(), UsageError, "the mesh {} has more places than the world has ranks ({})",
               describe_axes(axes), world.size());
  }
  FSDP_CHECK(product == world.size(), UsageError, "the mesh {} has {} places, the world has {} ranks",
             describe_axes(axes), product, world.size());
  const int rank = static_cast<int>(world.rank().value());
  std::vector<AxisCommunicators> communicators(axes.size());
  int stride = 1;  // distance in world rank between neighbours on the axis
  for (std::size_t i = axes.size(); i-- > 0;) {
    const int size = axes[i].size;
    const int first = rank - (rank / stride % size) * stride;
    std::vector<int> ranks;
    for (int r = 0; r < size; ++r) ranks.push_back(first + r * stride);
    communicators[i] = {world.create_communicator(ranks, axes[i].name + ".gather", GroupUse::gather),
                        world.create_communicator(ranks, axes[i].name + ".reduce", GroupUse::reduce)};
    const bool host_memory = !world.runtime()->device().is_cuda();
    communicators[i].host =
        host_memory ? communicators[i].gather : world.host().create_communicator(ranks, axes[i].name + ".host");
    stride *= size;
  }
  state_ = std::make_shared<State>(State{std::move(world), std::move(axes), std::move(communicators)});
}

DeviceMesh::DeviceMesh(World world, std::vector<std::string> names, std::vector<AxisCommunicators> communicators) {
  FSDP_CHECK(names.size() == communicators.size(), UsageError,
             "expected one pair of communicators per axis: {} axes, {} pairs", names.size(), communicators.size());
  std::vector<MeshAxis> axes;
  for (std::size_t i = 0; i < names.size(); ++i) {
    const auto& [gather, reduce, host] = communicators[i];
    FSDP_CHECK(gather && reduce, UsageError, "axis \"{}\": both communicators must be created", names[i]);
    FSDP_CHECK(gather.size() == reduce.size() && gather.rank() == reduce.rank(), UsageError,
               "axis \"{}\": the gather communicator has rank {} of {}, the reduce communicator rank {} of {}",
               names[i], gather.rank().value(), gather.size(), reduce.rank().value(), reduce.size());
    if (!host && !world.runtime()->device().is_cuda()) communicators[i].host = gather;
    axes.push_back({names[i], gather.size()});
  }
  check_names(axes);
  state_ = std::make_shared<State>(State{std::move(world), std::move(axes), std::move(communicators)});
}

int DeviceMesh::axis_index(const std::string& name) const {
  for (std::size_t i = 0; i < state_->axes.size(); ++i) {
    if (state_->axes[i].name == name) return static_cast<int>(i);
  }
  detail::fail<UsageError>("the mesh {} has no axis \"{}\"", describe(), name);
}

std::string DeviceMesh::describe() const { return describe_axes(state_->axes); }

}  // namespace fsdp
