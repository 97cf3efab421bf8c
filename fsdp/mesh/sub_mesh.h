// The axes of a mesh that one strategy uses, in the strategy's order.
#pragma once

#include <string>
#include <vector>

#include "fsdp/mesh/device_mesh.h"

namespace fsdp {

class SubMesh {
 public:
  // Throws UsageError when the mesh lacks one of the axes.
  SubMesh(DeviceMesh mesh, const std::vector<std::string>& axis_names);

  [[nodiscard]] const DeviceMesh& mesh() const { return mesh_; }
  [[nodiscard]] const std::vector<int>& sizes() const { return sizes_; }              // [axis of the strategy]
  [[nodiscard]] const std::vector<int>& coordinates() const { return coordinates_; }  // [axis of the strategy]
  [[nodiscard]] const std::vector<int>& axes() const { return axes_; }                // index into the mesh's
  [[nodiscard]] int rank_count() const;                                               // product of the sizes
  [[nodiscard]] const Communicator& communicator(int axis, Use use) const {
    return mesh_.communicator(axes_[axis], use);
  }

 private:
  DeviceMesh mesh_;
  std::vector<int> axes_;  // index into the mesh, [axis of the strategy]
  std::vector<int> sizes_;
  std::vector<int> coordinates_;
};

}  // namespace fsdp
