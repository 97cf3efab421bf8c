// How a test starts its ranks: as threads of its process (ranks_threads.cpp) or as the processes of an mpirun
// (ranks_processes.cpp). One of the two is linked, so that a suite is written once for both.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "fsdp/mesh/world.h"

namespace fsdp::testing {

// A way around the communicator under test, over which ranks wait for each other and compare notes.
class SideChannel {
 public:
  virtual ~SideChannel() = default;
  // Every rank's value, [rank]; all ranks call it. Throws when one does not come within 20 s.
  virtual std::vector<std::int64_t> gather(int rank, std::int64_t value) = 0;
  void meet(int rank) { gather(rank, 0); }
};

using RankMain = std::function<void(World, SideChannel&)>;

// Calls `rank_main` once a rank and throws the first error; of processes each throws its own.
void run_on_ranks(int size, const RankMain& rank_main, const WorldOptions& options = {});

[[nodiscard]] std::string backend_under_test();           // "threads", "mpi"
[[nodiscard]] std::vector<int> world_sizes_under_test();  // ascending, from 1
[[nodiscard]] bool ranks_are_processes();
// The rank of this process, where they are processes.
[[nodiscard]] int own_process_rank();

}  // namespace fsdp::testing
