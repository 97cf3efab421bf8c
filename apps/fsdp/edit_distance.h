// How many letters apart two words are; finds what a mistyped key meant.
#pragma once

#include <cstddef>
#include <string_view>

namespace fsdp::app {

// Levenshtein distance.
[[nodiscard]] std::size_t edit_distance(std::string_view a, std::string_view b);

}  // namespace fsdp::app
