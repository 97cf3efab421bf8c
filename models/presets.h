// Sizes of transformers by name.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "models/transformer_config.h"

namespace fsdp::models {

[[nodiscard]] const std::vector<std::string_view>& preset_names();
[[nodiscard]] std::optional<TransformerConfig> find_preset(std::string_view name);

}  // namespace fsdp::models
