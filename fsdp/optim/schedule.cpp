#include "fsdp/optim/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace fsdp {

double LearningRateSchedule::at(std::int64_t step) const {
  if (step < warmup_steps) return peak * static_cast<double>(step + 1) / static_cast<double>(warmup_steps);
  if (decay == Decay::constant) return peak;
  if (step >= total_steps) return peak * final_fraction;
  const auto span = std::max<std::int64_t>(1, total_steps - warmup_steps);
  const double progress = std::min(1.0, static_cast<double>(step - warmup_steps) / static_cast<double>(span));
  const double shape = decay == Decay::linear ? 1.0 - progress : 0.5 * (1.0 + std::cos(std::numbers::pi * progress));
  return peak * (final_fraction + (1.0 - final_fraction) * shape);
}

}  // namespace fsdp
