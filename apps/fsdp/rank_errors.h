// What keeps some ranks from starting, and what they would do differently, is told once: by rank 0, with the ranks it
// concerns.
#pragma once

#include <string>
#include <vector>

#include "fsdp/mesh/world.h"

namespace fsdp::app {

// Collective. `own` is what is wrong on this rank, empty if nothing is. When something is wrong on any, rank 0 throws
// UsageError with what it is and where, and the others SilentExit with the code of a usage error.
void settle_errors(const World& world, const std::string& own);

// Collective. `own` are lines such as "run.steps = 10", in the same order on all ranks. When ranks differ, rank 0
// throws UsageError with the lines that do, and the others SilentExit.
void settle_differences(const World& world, const std::string& own);

// [rank] -> one text that says what is wrong and on which ranks; empty when all are empty.
[[nodiscard]] std::string merge_errors(const std::vector<std::string>& errors);

// [rank] -> the lines in which ranks differ from rank 0, and how; empty when all are equal.
[[nodiscard]] std::string describe_differences(const std::vector<std::string>& texts);

}  // namespace fsdp::app
