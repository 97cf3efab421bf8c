// Learning-rate schedules. Pure functions of the step.
#pragma once

#include <cstdint>

namespace fsdp {

enum class Decay : std::uint8_t { constant, linear, cosine };

struct LearningRateSchedule {
  double peak = 1e-3;
  double final_fraction = 0.1;    // of the peak, reached at `total_steps`
  std::int64_t warmup_steps = 0;  // linear from peak / warmup_steps
  std::int64_t total_steps = 1;
  Decay decay = Decay::cosine;

  // For step 0, 1, ...; constant at the final value from `total_steps` on.
  [[nodiscard]] double at(std::int64_t step) const;
};

}  // namespace fsdp
