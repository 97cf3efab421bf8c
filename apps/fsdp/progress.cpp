#include "apps/fsdp/progress.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "apps/fsdp/console.h"

namespace fsdp::app {

void Progress::step(const StepResult& result) {
  std::lock_guard lock(mutex_);
  // The first step warms up allocators and kernels: it only counts until there is a second.
  const double weight = ++steps_seen_ <= 2 ? 1.0 : 0.1;
  smooth_seconds_ += weight * (result.seconds - smooth_seconds_);
  smooth_exposed_ += weight * (result.exposed - smooth_exposed_);
  total_seconds_ += result.seconds;
  if (options_.live) {
    const auto now = std::chrono::steady_clock::now();
    if (now - last_drawn_ < std::chrono::milliseconds(100) && result.step != options_.steps) return;
    last_drawn_ = now;
    console::draw_live(describe(result));
    live_shown_ = true;
  } else if (steps_seen_ == 1 || result.step % options_.log_interval == 0 || result.step == options_.steps) {
    console::print(describe(result));
  }
}

void Progress::line(std::string_view text) {
  std::lock_guard lock(mutex_);
  end_live();
  console::print(text);
}

void Progress::warning(std::string_view text) {
  std::lock_guard lock(mutex_);
  end_live();
  console::warn(text);
}

std::string Progress::describe(const StepResult& result) const {
  double left = smooth_seconds_ * static_cast<double>(options_.steps - result.step);
  if (options_.max_seconds > 0) left = std::min(left, std::max(0.0, options_.max_seconds - total_seconds_));
  const double speed = smooth_seconds_ > 0 ? static_cast<double>(result.tokens) / smooth_seconds_ : 0;
  return fmt::format("step {}/{}  loss {:.4f}  {:.0f} tokens/s  exposed {:.1f} %  memory {}  left {}", result.step,
                     options_.steps, result.loss, speed, 100 * smooth_exposed_, format_bytes(result.peak_bytes),
                     format_duration(left));
}

void Progress::end_live() {
  if (!live_shown_) return;
  console::end_live();
  live_shown_ = false;
}

std::string format_bytes(std::int64_t bytes) {
  constexpr std::array units{"B", "KiB", "MiB", "GiB", "TiB"};
  auto value = static_cast<double>(bytes);
  std::size_t unit = 0;
  for (; value >= 1024 && unit + 1 < units.size(); ++unit) value /= 1024;
  return fmt::format("{:.{}f} {}", value, unit == 0 ? 0 : 1, units[unit]);
}

std::string format_duration(double seconds) {
  const auto total = static_cast<std::int64_t>(std::llround(seconds));
  const auto hours = total / 3600, minutes = total / 60 % 60, rest = total % 60;
  return hours > 0 ? fmt::format("{}:{:02}:{:02}", hours, minutes, rest) : fmt::format("{}:{:02}", minutes, rest);
}

}  // namespace fsdp::app
