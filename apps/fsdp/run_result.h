// What a step and a whole run came to.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>

namespace fsdp::app {

struct StepResult {
  std::int64_t step = 0;  // from 1
  double loss = 0;        // nats a token, mean over the global batch, before the update
  double grad_norm = 0;   // before clipping
  double learning_rate = 0;
  double seconds = 0;
  std::int64_t tokens = 0;  // of all ranks
  std::int64_t peak_bytes =
      0;                 // of rank 0 so far, by the library's books: weights, gradients, optimizer state, buffers
  double exposed = 0;    // share of the time in which rank 0 stood still for communication
  double data_wait = 0;  // seconds in which rank 0 waited for its batch

  [[nodiscard]] double tokens_per_second() const { return seconds > 0 ? static_cast<double>(tokens) / seconds : 0; }
};

struct SavedCheckpoint {
  std::int64_t step = 0;
  std::filesystem::path folder;
  std::int64_t bytes = 0;      // of all ranks; known on rank 0
  double seconds = 0;          // from its begin until it was whole
  double stalled_seconds = 0;  // of them, in which training stood still
};

struct RunResult {
  std::optional<double> validation_loss;  // none after an interruption
  std::int64_t parameters = 0;
  int ranks = 1;
  std::int64_t steps = 0;
  double seconds = 0;  // of training steps, evaluation left out
  std::int64_t tokens = 0;
  double exposed = 0;
  bool exposed_is_known = true;  // on a GPU a profile tells
  double data_wait = 0;          // seconds
  std::int64_t peak_bytes = 0;
  std::int64_t skipped_steps = 0;  // for gradients that were not finite
  bool interrupted = false;
  bool out_of_time = false;

  [[nodiscard]] double tokens_per_second() const { return seconds > 0 ? static_cast<double>(tokens) / seconds : 0; }
};

}  // namespace fsdp::app
