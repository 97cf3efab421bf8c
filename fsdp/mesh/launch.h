// Starts the ranks of a program wherever it runs: the one entry for the desk, mpirun, srun and torchrun.
#pragma once

#include <functional>

#include "fsdp/mesh/world.h"

namespace fsdp {

struct LaunchOptions {
  // Threads of this process, where no launcher has started several processes; on CUDA one (spawn_ranks.h starts more).
  int ranks = 1;
  WorldOptions world = {};
};

// Calls `rank_main` once a rank: in this process as the rank that the launcher made it, or on `ranks` threads
// (run_ranks). When it throws, all other ranks' operations fail with its message (AbortedError), and the exception is
// thrown here. Sets the number of operator threads of a process to its share of the machine, unless OMP_NUM_THREADS is
// set.
void launch(const std::function<void(World)>& rank_main, const LaunchOptions& options = {});

}  // namespace fsdp
