// Sizes of transformers by name.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "models/moe_config.h"

namespace fsdp::models {

[[nodiscard]] const std::vector<std::string_view>& preset_names();
// Of a mixture of experts: what its dense parts are like.
[[nodiscard]] std::optional<TransformerConfig> find_preset(std::string_view name);
// Without experts for a dense transformer.
[[nodiscard]] std::optional<MoeConfig> find_moe_preset(std::string_view name);

}  // namespace fsdp::models
