#include "fsdp/mesh/axis_ranks.h"

namespace fsdp {

std::vector<int> ranks_on_axis(const DeviceMesh& mesh, int axis) {
  int stride = 1;  // the last axis varies fastest
  for (int later = axis + 1; later < mesh.axis_count(); ++later) stride *= mesh.axis(later).size;
  const int first = static_cast<int>(mesh.world().rank().value()) - mesh.coordinate(axis) * stride;
  std::vector<int> ranks;
  for (int i = 0; i < mesh.axis(axis).size; ++i) ranks.push_back(first + i * stride);
  return ranks;
}

}  // namespace fsdp
