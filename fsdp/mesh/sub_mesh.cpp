#include "fsdp/mesh/sub_mesh.h"

#include <functional>
#include <numeric>

namespace fsdp {

SubMesh::SubMesh(DeviceMesh mesh, const std::vector<std::string>& axis_names) : mesh_(std::move(mesh)) {
  for (const auto& name : axis_names) {
    const int axis = mesh_.axis_index(name);
    axes_.push_back(axis);
    sizes_.push_back(mesh_.axis(axis).size);
    coordinates_.push_back(mesh_.coordinate(axis));
  }
}

int SubMesh::rank_count() const { return std::accumulate(sizes_.begin(), sizes_.end(), 1, std::multiplies<>()); }

}  // namespace fsdp
