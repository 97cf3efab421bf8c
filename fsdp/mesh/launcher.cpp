#include "fsdp/mesh/launcher.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>

#include "fsdp/base/check.h"
#include "fsdp/base/env.h"

namespace fsdp {
namespace {

struct Variables {
  const char *name, *rank, *size, *local_rank, *local_size;
};

constexpr Variables kTorchrun{"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"};
constexpr Variables kMpirun{"mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                            "OMPI_COMM_WORLD_LOCAL_SIZE"};
constexpr Variables kSrun{"srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"};

std::optional<Launcher> read(const Variables& variables) {
  const auto rank = env::integer(variables.rank);
  const auto size = env::integer(variables.size);
  FSDP_CHECK(rank.has_value() == size.has_value() || &variables != &kTorchrun, UsageError,
             "{} is set, but {} is not: set both, as torchrun does, or neither", rank ? variables.rank : variables.size,
             rank ? variables.size : variables.rank);
  if (!rank || !size) return std::nullopt;
  FSDP_CHECK(*size >= 1 && *size <= 1'000'000 && *rank >= 0 && *rank < *size, UsageError,
             "{} set {}={} and {}={}; expected a rank below the size", variables.name, variables.rank, *rank,
             variables.size, *size);
  Launcher launcher{variables.name, variables.rank, variables.size, static_cast<int>(*rank), static_cast<int>(*size)};
  launcher.local_rank = static_cast<int>(env::integer(variables.local_rank).value_or(0));
  launcher.local_size = static_cast<int>(env::integer(variables.local_size).value_or(1));
  return launcher;
}

}  // namespace

std::optional<Launcher> find_launcher() {
  const bool elastic = env::text("TORCHELASTIC_RUN_ID").has_value();
  const std::array<const Variables*, 3> order =
      elastic ? std::array{&kTorchrun, &kMpirun, &kSrun} : std::array{&kMpirun, &kTorchrun, &kSrun};
  for (const auto* variables : order) {
    if (auto launcher = read(*variables)) return launcher;
  }
  return std::nullopt;
}

int threads_per_process(const Launcher& launcher) {
  const int cores = static_cast<int>(std::max(1L, sysconf(_SC_NPROCESSORS_ONLN)));
  cpu_set_t bound;
  CPU_ZERO(&bound);
  const int usable = sched_getaffinity(0, sizeof(bound), &bound) == 0 ? std::max(1, CPU_COUNT(&bound)) : cores;
  // Fewer than there are: the launcher has bound this process to cores of its own.
  return usable < cores ? usable : std::max(1, usable / std::max(1, launcher.local_size));
}

}  // namespace fsdp
