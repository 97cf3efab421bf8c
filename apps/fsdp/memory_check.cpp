#include "apps/fsdp/memory_check.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <limits>

#include "apps/fsdp/config_check.h"
#include "apps/fsdp/progress.h"
#include "fsdp/base/check.h"

namespace fsdp::app {
namespace {

std::int64_t memory_of_machine() {
  std::int64_t limit = static_cast<std::int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
  for (const char* file : {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"}) {
    std::int64_t group = 0;  // "max" leaves it as it is
    if (std::ifstream(file) >> group && group > 0) limit = std::min(limit, group);
  }
  return limit;
}

}  // namespace

std::int64_t resting_bytes(const TrainConfig& config) {
  const auto axes = mesh_axes(config);
  std::int64_t all = 1;
  for (const auto& axis : axes) all *= axis.size;
  const auto& strategy = config.parallel.strategy;
  const std::int64_t state_bytes = config.optimizer.name == "adamw" ? 8 : config.optimizer.momentum > 0 ? 4 : 0;
  const std::int64_t low_precision = config.parallel.param_dtype == "bf16" ? 2 : 0;
  // Parameters that are sharded over so many ranks, of which so many make a piece of hsdp.
  const auto bytes = [&](std::int64_t parameters, std::int64_t over, std::int64_t inner) {
    const std::int64_t weights = strategy == "zero3" || strategy == "hfsdp" || strategy == "hsdp" ? inner : 1;
    const std::int64_t gradients = strategy == "ddp" || strategy == "zero1" ? 1 : inner;
    const std::int64_t state = strategy == "ddp" ? 1 : strategy == "hsdp" ? inner : over;
    return parameters * (4 + low_precision) / weights + parameters * 4 / gradients + parameters * state_bytes / state;
  };
  const auto parameters = parameter_count(config);
  if (config.model.moe.experts == 0) return bytes(parameters, all, strategy == "hsdp" ? axes.back().size : all);
  const models::MoeConfig moe = moe_config(config);
  const std::int64_t of_layer = moe.experts * 3 * moe.base.width * moe.expert_width;
  const std::int64_t experts = (moe.base.layers - moe.dense_layers) * of_layer;
  // Experts are spread over the expert ranks whatever the strategy. A layer's are in memory whole while it computes,
  // with their gradients.
  const std::int64_t element = config.parallel.param_dtype == "bf16" ? 2 : 4;
  return bytes(parameters - experts, all, all) + bytes(experts / axes[1].size, axes[0].size, axes[0].size) +
         of_layer / axes[1].size * 2 * element;
}

void check_memory(const TrainConfig& config, int local_ranks) {
  const auto needed = resting_bytes(config);
  const auto there = memory_of_machine();
  FSDP_CHECK(needed <= there / std::max(1, local_ranks), UsageError,
             "model: {} parameters under {} need at least {} on each of the {} ranks of this machine, which has {} in "
             "all: take a smaller model, more machines or a strategy that shards more (zero3)",
             parameter_count(config), config.parallel.strategy, format_bytes(needed), local_ranks, format_bytes(there));
}

}  // namespace fsdp::app
