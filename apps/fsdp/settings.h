// Settings as the library's own options.
#pragma once

#include "apps/fsdp/train_config.h"
#include "fsdp/mesh/world.h"
#include "fsdp/module/options.h"
#include "fsdp/optim/schedule.h"
#include "models/transformer_config.h"

namespace fsdp::app {

[[nodiscard]] DeviceKind device_kind(const TrainConfig& config);
[[nodiscard]] ContextOptions context_options(const TrainConfig& config);
[[nodiscard]] UnitOptions unit_options(const TrainConfig& config);
[[nodiscard]] LearningRateSchedule learning_rate_schedule(const TrainConfig& config);

}  // namespace fsdp::app
