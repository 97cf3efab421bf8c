// Which program started this process, as one of how many: read from the variables that torchrun, mpirun and srun set.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace fsdp {

struct Launcher {
  std::string name;           // "torchrun", "mpirun" or "srun"
  std::string rank_variable;  // where `rank` came from, for messages
  std::string size_variable;
  int rank = 0, size = 1;              // of all processes of the job
  int local_rank = 0, local_size = 1;  // of those on this machine
};

// Empty without a launcher. When several have set their variables, the innermost one counts: torchrun (known by
// TORCHELASTIC_RUN_ID), then mpirun, then RANK and WORLD_SIZE alone, then srun. Throws UsageError when a variable is no
// number, the rank is not below the size, or only one of RANK and WORLD_SIZE is set.
[[nodiscard]] std::optional<Launcher> find_launcher();

// Threads for operators of one process of this machine: the cores it is bound to, or an equal share of the machine's.
[[nodiscard]] int threads_per_process(const Launcher& launcher);

}  // namespace fsdp
