#include "fsdp/mesh/world.h"

#include <algorithm>

#include <fmt/ranges.h>

#include "fsdp/base/check.h"
#include "fsdp/comm/loopback/host_loopback.h"
#include "fsdp/comm/nccl/nccl_module.h"
#include "fsdp/comm/simulated/simulated_backend.h"
#include "fsdp/comm/threads/threads_group.h"
#include "fsdp/mesh/cuda_world.h"
#include "fsdp/mesh/launcher.h"
#include "fsdp/mesh/process_world.h"
#include "fsdp/runtime/simulated/simulated_runtime.h"

namespace fsdp {

World World::single(const WorldOptions& options) {
  const bool cuda = uses_cuda(options.device);
  auto backend = std::make_shared<Backend>();
  backend->name = "single";
  backend->runtime = make_cpu_runtime();
  backend->create_group = [](std::span<const int> ranks, int group_rank, const std::string& key, GroupUse) {
    return ThreadsGroup::join(
        std::make_shared<ThreadsGroup>(key, std::vector<int>(ranks.begin(), ranks.end()), std::chrono::minutes(10)),
        group_rank);
  };
  if (!cuda) return World(std::move(backend));
  World world = loopback({.size = 1});
  world.backend_->name = "single";
  world.backend_->host = std::move(backend);
  return world;
}

World World::from_environment(const WorldOptions& options) {
  const auto launcher = find_launcher();
  if (!launcher || launcher->size == 1) return single(options);
  return *process_world(*launcher, options);
}

World World::loopback(const LoopbackOptions& options) {
  FSDP_CHECK(options.size >= 1, UsageError, "a loopback world needs at least 1 rank, got {}", options.size);
  auto host = std::make_shared<Backend>();
  host->name = "loopback";
  host->size = options.size;
  host->runtime = make_cpu_runtime();
  host->create_group = [](std::span<const int> ranks, int, const std::string&, GroupUse) {
    return make_host_loopback(static_cast<int>(ranks.size()));
  };
  auto backend = std::make_shared<Backend>();
  backend->name = "loopback";
  backend->size = options.size;
  backend->runtime = make_cuda_runtime(current_cuda_device());
  backend->create_group = [runtime = backend->runtime, options](std::span<const int> ranks, int, const std::string&,
                                                                GroupUse use) {
    LoopbackOptions group = options;
    group.size = static_cast<int>(ranks.size());
    return nccl::module().make_loopback(runtime, group, use);
  };
  backend->host = std::move(host);
  return World(std::move(backend));
}

World World::simulated(int size, const CostModel& costs) {
  FSDP_CHECK(size >= 1, UsageError, "a simulated world needs at least 1 rank, got {}", size);
  auto runtime = make_simulated_runtime(costs);
  auto backend = std::make_shared<Backend>();
  backend->name = "simulated";
  backend->size = size;
  backend->runtime = runtime;
  backend->create_group = [runtime](std::span<const int> ranks, int, const std::string&, GroupUse) {
    return make_simulated_backend(runtime, static_cast<int>(ranks.size()));
  };
  return World(std::move(backend));
}

Communicator World::create_communicator(std::span<const int> ranks, const std::string& name, GroupUse use) const {
  FSDP_CHECK(std::is_sorted(ranks.begin(), ranks.end()), UsageError, "communicator {}: expected ascending ranks", name);
  const auto mine = std::find(ranks.begin(), ranks.end(), static_cast<int>(rank().value()));
  FSDP_CHECK(mine != ranks.end(), UsageError, "communicator {}: rank {} is not among its ranks", name, rank().value());
  const int group_rank = static_cast<int>(mine - ranks.begin());
  // The members make their common groups in the same order, whatever groups each makes with others.
  const int count = backend_->groups_created[{ranks.begin(), ranks.end()}]++;
  const std::string key = fmt::format("{}/{}/{}", name, fmt::join(ranks, ","), count);
  return Communicator(backend_->create_group(ranks, group_rank, key, use), backend_->runtime, Rank(group_rank),
                      static_cast<int>(ranks.size()), name);
}

void World::abort(const std::string& reason) const {
  if (backend_->host) host().abort(reason);
  if (backend_->abort) backend_->abort(reason);
}

}  // namespace fsdp
