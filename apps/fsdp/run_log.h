// The file of `--log`: one JSON object a line, whole lines only, flushed at once so that a killed run keeps its past.
#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <nlohmann/json_fwd.hpp>

#include "apps/fsdp/run_result.h"

namespace fsdp::app {

class RunLog {
 public:
  // Makes the parent folder and replaces the file. An empty path: nothing is written. Throws UsageError naming the
  // path.
  explicit RunLog(const std::filesystem::path& path);

  void step(const StepResult& result);
  void validation(std::int64_t step, double loss);
  void done(const RunResult& result);

 private:
  void write(const nlohmann::ordered_json& object);

  std::filesystem::path path_;
  std::ofstream file_;
};

}  // namespace fsdp::app
