// `fsdp train`: checks everything, runs the ranks, reports.
#pragma once

#include <filesystem>

#include "apps/fsdp/config_reader.h"
#include "apps/fsdp/run_failure.h"

namespace fsdp::app {

struct TrainCommand {
  ConfigSources sources;
  std::filesystem::path log;      // empty: none
  std::filesystem::path profile;  // empty: none
};

// Returns the exit code: 0, or 130 after Ctrl-C. Throws UsageError for settings that cannot work, before any rank
// starts; a failure of the run itself is thrown as RunFailure.
int train(const TrainCommand& command);

}  // namespace fsdp::app
