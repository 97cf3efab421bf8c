// Reads a TrainConfig: TOML file, then "key=value" settings of the command line, each checked against the table.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "apps/fsdp/train_config.h"

namespace fsdp::app {

struct ConfigSources {
  std::filesystem::path file;
  std::vector<std::string> settings = {};  // "key=value", later ones win over the file
  std::optional<int> ranks = {};           // wins over run.ranks
};

// Throws UsageError naming file, line, key, what is expected and what came.
[[nodiscard]] TrainConfig read_train_config(const ConfigSources& sources);

}  // namespace fsdp::app
