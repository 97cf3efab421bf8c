// What the user sees while training: one live line in a terminal, a plain line every few steps otherwise.
//
// Also the sink of everything else that is printed meanwhile, so that the live line never mixes with it. Any thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>

#include "apps/fsdp/run_result.h"

namespace fsdp::app {

struct ProgressOptions {
  bool live = false;               // standard output is a terminal
  std::int64_t steps = 1;          // planned
  std::int64_t log_interval = 10;  // steps between plain lines
  double max_seconds = 0;          // 0: no limit
};

class Progress {
 public:
  explicit Progress(const ProgressOptions& options) : options_(options) {}

  void step(const StepResult& result);
  // A line that stays.
  void line(std::string_view text);
  void warning(std::string_view text);

 private:
  [[nodiscard]] std::string describe(const StepResult& result) const;
  void end_live();

  ProgressOptions options_;
  std::mutex mutex_;
  std::int64_t steps_seen_ = 0;
  double smooth_seconds_ = 0;  // of a step, a moving average
  double smooth_exposed_ = 0;
  double total_seconds_ = 0;
  bool live_shown_ = false;
  std::chrono::steady_clock::time_point last_drawn_{};
};

[[nodiscard]] std::string format_bytes(std::int64_t bytes);  // "1.5 GiB"
[[nodiscard]] std::string format_duration(double seconds);   // "3:05", "2:03:05"

}  // namespace fsdp::app
