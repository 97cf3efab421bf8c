// In-process ranks: N threads, each with a world of its own, on the CPU.
#pragma once

#include <functional>

#include "fsdp/mesh/world.h"

namespace fsdp {

// Calls `rank_main(world)` on `size` threads and returns when all have returned. Each rank gets an equal share of the
// cores for its operators. When one throws, the others' collectives are aborted with its message, and the first
// exception is thrown here; its type is kept.
void run_ranks(int size, const std::function<void(World)>& rank_main, const WorldOptions& options = {});

}  // namespace fsdp
