// Records the spans of a few steps after warm-up (`--profile`) and writes them as a Chrome trace.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/runtime/runtime.h"

namespace fsdp::app {

class Profiler {
 public:
  // Of one rank, of `steps` planned. An empty path: records nothing.
  Profiler(std::filesystem::path path, std::shared_ptr<Runtime> runtime, int rank, std::int64_t steps);

  // Between steps, with no work in flight. `step` is the one about to begin, from 0.
  void before_step(std::int64_t step);

  // Ends the recording and writes the file. The overlap report as text; empty when nothing was recorded.
  [[nodiscard]] std::string finish();

 private:
  static constexpr std::int64_t kFirst = 5;  // step; earlier ones warm up
  static constexpr std::int64_t kCount = 3;  // steps: spans stay few

  std::filesystem::path path_;
  std::shared_ptr<Runtime> runtime_;
  int rank_;
  std::int64_t first_, last_;  // steps, `last_` is not recorded
  void stop();

  bool on_device_, stopped_ = false;
  std::shared_ptr<trace::Recorder> recorder_;
  std::vector<trace::Span> spans_;
};

}  // namespace fsdp::app
