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
  // Makes the parent folder and makes sure that the file can be written. An empty path: nothing is written. Throws
  // UsageError naming the path.
  explicit RunLog(const std::filesystem::path& path);

  // The run begins: what an earlier one left in the file goes, all of it or what came after the first `steps` steps,
  // with the evaluation at that point, which the run makes again.
  void begin(std::int64_t steps);

  void step(const StepResult& result);
  void validation(std::int64_t step, double loss);
  void checkpoint(const SavedCheckpoint& saved);
  void done(const RunResult& result);

 private:
  void write(const nlohmann::ordered_json& object);

  std::filesystem::path path_;
  std::ofstream file_;
};

}  // namespace fsdp::app
