// What keeps some ranks from starting is told once: by rank 0, with the ranks it concerns.
#pragma once

#include <string>
#include <vector>

#include "fsdp/mesh/world.h"

namespace fsdp::app {

// Collective. `own` is what is wrong on this rank, empty if nothing is. When something is wrong on any, rank 0 throws
// UsageError with what it is and where, and the others SilentExit with the code of a usage error.
void settle_errors(const World& world, const std::string& own);

// [rank] -> one text that says what is wrong and on which ranks; empty when all are empty.
[[nodiscard]] std::string merge_errors(const std::vector<std::string>& errors);

}  // namespace fsdp::app
