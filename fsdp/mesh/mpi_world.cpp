#include "fsdp/mesh/mpi_world.h"

#include "fsdp/base/check.h"
#include "fsdp/comm/mpi/mpi_group.h"
#include "fsdp/comm/mpi/process.h"

namespace fsdp {

std::optional<World> mpi_world(const WorldOptions& options, int size) {
  const auto process = mpi::Process::connect(options.deadline);
  FSDP_CHECK(size >= 0 && size <= process->size(), UsageError, "expected a world of 1 to {} processes, got {}",
             process->size(), size);
  const std::uint64_t id = process->next_world();
  auto backend = std::make_shared<World::Backend>();
  backend->name = "mpi";
  backend->rank = Rank(process->rank());
  backend->size = size == 0 ? process->size() : size;
  if (process->rank() >= backend->size) return std::nullopt;
  backend->runtime = make_cpu_runtime();
  backend->create_group = [process, id, deadline = options.deadline](
                              std::span<const int> ranks, int group_rank,
                              const std::string& key) -> std::shared_ptr<CommunicatorBackend> {
    const std::vector<int> members(ranks.begin(), ranks.end());
    return std::make_shared<mpi::MpiGroup>(process, mpi::GroupOptions{.name = key.substr(0, key.find('/')),
                                                                      .key = key,
                                                                      .processes = members,
                                                                      .members = members,
                                                                      .rank = group_rank,
                                                                      .world = id,
                                                                      .deadline = deadline});
  };
  backend->abort = [process, id](const std::string& reason) { process->fail_world(id, reason); };
  return World(std::move(backend));
}

}  // namespace fsdp
