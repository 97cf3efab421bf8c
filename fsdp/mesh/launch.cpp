#include "fsdp/mesh/launch.h"

#include <ATen/Parallel.h>
#include <fmt/format.h>

#include "fsdp/base/env.h"
#include "fsdp/mesh/cuda_world.h"
#include "fsdp/mesh/launcher.h"
#include "fsdp/mesh/run_ranks.h"

namespace fsdp {

void launch(const std::function<void(World)>& rank_main, const LaunchOptions& options) {
  const auto launcher = find_launcher();
  if (!launcher || launcher->size == 1) {
    if (options.ranks == 1 && uses_cuda(options.world.device)) return rank_main(World::single(options.world));
    WorldOptions on_cpu = options.world;
    if (on_cpu.device == DeviceKind::automatic) on_cpu.device = DeviceKind::cpu;
    return run_ranks(options.ranks, rank_main, on_cpu);
  }
  if (!env::text("OMP_NUM_THREADS")) at::set_num_threads(threads_per_process(*launcher));
  const World world = World::from_environment(options.world);
  const auto fail = [&](const std::string& what) {
    world.abort(fmt::format("rank {} failed: {}", world.rank().value(), what));
  };
  try {
    rank_main(world);
  } catch (const std::exception& error) {
    fail(error.what());
    throw;
  } catch (...) {
    fail("an exception that is not a std::exception");
    throw;
  }
}

}  // namespace fsdp
