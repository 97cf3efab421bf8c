#include "fsdp/mesh/process_world.h"

#include "fsdp/base/check.h"
#include "fsdp/comm/processes/process.h"
#include "fsdp/comm/processes/process_group.h"
#include "fsdp/comm/processes/rendezvous.h"
#include "fsdp/mesh/cuda_world.h"

namespace fsdp {
namespace {

std::shared_ptr<processes::Process> join(const Launcher& launcher, std::chrono::milliseconds deadline) {
  if (launcher.name == "torchrun") {
    const auto rendezvous = [launcher, deadline] {
      return processes::make_rendezvous({launcher.rank, launcher.size, deadline});
    };
    return processes::Process::connect(processes::kZeroMqModule, rendezvous, deadline);
  }
  auto process = processes::Process::connect(
      processes::kMpiModule, [] { return processes::Bootstrap{}; }, deadline);
  FSDP_CHECK(process->size() == launcher.size && process->rank() == launcher.rank, UsageError,
             "{} says rank {} of {} ({}), but MPI says rank {} of {}: {}", launcher.name, launcher.rank, launcher.size,
             launcher.size_variable, process->rank(), process->size(),
             launcher.name == "srun" ? "start with srun --mpi=pmix, so that the processes find each other"
                                     : "do the program and mpirun belong to the same MPI?");
  return process;
}

}  // namespace

std::optional<World> process_world(const Launcher& launcher, const WorldOptions& options, int size) {
  const auto process = join(launcher, options.deadline);
  FSDP_CHECK(size >= 0 && size <= process->size(), UsageError, "expected a world of 1 to {} processes, got {}",
             process->size(), size);
  const std::uint64_t id = process->next_world();
  auto backend = std::make_shared<World::Backend>();
  backend->name = process->transport_name();
  backend->rank = Rank(process->rank());
  backend->size = size == 0 ? process->size() : size;
  if (process->rank() >= backend->size) return std::nullopt;
  backend->runtime = make_cpu_runtime();
  backend->create_group = [process, id, deadline = options.deadline](std::span<const int> ranks, int group_rank,
                                                                     const std::string& key,
                                                                     GroupUse) -> std::shared_ptr<CommunicatorBackend> {
    const std::vector<int> members(ranks.begin(), ranks.end());
    return std::make_shared<processes::ProcessGroup>(process,
                                                     processes::GroupOptions{.name = key.substr(0, key.find('/')),
                                                                             .key = key,
                                                                             .processes = members,
                                                                             .members = members,
                                                                             .rank = group_rank,
                                                                             .world = id,
                                                                             .deadline = deadline});
  };
  backend->abort = [process, id](const std::string& reason) { process->fail_world(id, reason); };
  if (!all_use_cuda(backend, options.device)) return World(std::move(backend));
  const auto failure = [process, id] {
    process->progress();
    return process->failure(id);
  };
  return cuda_world(std::move(backend), launcher, failure, options.deadline);
}

}  // namespace fsdp
