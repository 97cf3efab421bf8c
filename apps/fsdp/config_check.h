// Combinations of settings that cannot work, refused by name before anything starts.
#pragma once

#include <vector>

#include "apps/fsdp/train_config.h"
#include "fsdp/mesh/device_mesh.h"

namespace fsdp::app {

// The axes of mesh.axes, or one axis "dp" of all ranks. Throws UsageError for a malformed entry or a product other than
// the number of ranks.
[[nodiscard]] std::vector<MeshAxis> mesh_axes(const TrainConfig& config);

// The mixture of experts that model.* describe; without experts where they describe a dense model.
[[nodiscard]] models::MoeConfig moe_config(const TrainConfig& config);
[[nodiscard]] std::int64_t parameter_count(const TrainConfig& config);  // of all ranks together

// Throws UsageError naming the settings that do not fit together, and how to mend them.
void validate_train_config(const TrainConfig& config);

}  // namespace fsdp::app
