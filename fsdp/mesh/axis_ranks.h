// World ranks of one axis of a mesh.
#pragma once

#include <vector>

#include "fsdp/mesh/device_mesh.h"

namespace fsdp {

// Those that differ from this rank on that axis only, in its order; this rank among them. For further communicators
// over it. The mesh was made from axis sizes.
[[nodiscard]] std::vector<int> ranks_on_axis(const DeviceMesh& mesh, int axis);

}  // namespace fsdp
