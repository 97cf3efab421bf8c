// What a process needs before any rank runs: settings, data, and, on the one that reports, its outputs.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include "apps/fsdp/config_reader.h"
#include "apps/fsdp/progress.h"
#include "apps/fsdp/run_log.h"
#include "fsdp/data/token_dataset.h"
#include "fsdp/mesh/launcher.h"

namespace fsdp::app {

struct TrainCommand {
  ConfigSources sources;
  std::filesystem::path log;      // empty: none
  std::filesystem::path profile;  // empty: none
};

// The settings, with the number of ranks that `launcher` (if any) has started. Throws UsageError for settings that
// cannot work.
[[nodiscard]] TrainConfig resolve_config(const ConfigSources& sources, const std::optional<Launcher>& launcher);

struct TrainJob {
  // Throws UsageError before anything is written.
  TrainJob(const TrainCommand& command, const std::optional<Launcher>& launcher);

  TrainConfig config;
  bool leads;  // rank 0 is in this process
  std::unique_ptr<data::TokenDataset> data;
  std::filesystem::path profile;
  std::unique_ptr<RunLog> log;
  std::unique_ptr<Progress> progress;
};

// Processes that a launcher has started, each of which is one rank.
[[nodiscard]] inline bool are_processes(const std::optional<Launcher>& launcher) {
  return launcher && launcher->size > 1;
}

}  // namespace fsdp::app
