// Whether a model can fit at all, before anything is allocated.
#pragma once

#include <cstdint>

#include "apps/fsdp/train_config.h"

namespace fsdp::app {

// Bytes that one rank holds between steps: weights, gradients and optimizer state under the strategy. A lower bound of
// what training takes: activations and gathered units come on top.
[[nodiscard]] std::int64_t resting_bytes(const TrainConfig& config);

// Throws UsageError when `local_ranks` times that is more than this machine (or its control group) has.
void check_memory(const TrainConfig& config, int local_ranks);

}  // namespace fsdp::app
