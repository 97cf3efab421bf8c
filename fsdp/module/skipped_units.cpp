// The part of Scheduler that makes a rank take part in units that only others run (SkippedUnits::participate).
#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "fsdp/module/scheduler.h"

namespace fsdp {

void Scheduler::begin_pass(Phase phase) {
  if (options_.skipped_units != SkippedUnits::participate) return;
  const int p = static_cast<int>(phase);
  passed_[p] = gathered_up_to_[p] = 0;
  for (auto& unit : units_) unit->ran_[p] = false;
}

// Under SkippedUnits::participate: units before `next` in the static order (-1: all) that this rank did not run take
// part in what other ranks, which may have run them, have gathered and reduced.
void Scheduler::catch_up(Phase phase, int next) {
  if (options_.skipped_units != SkippedUnits::participate) return;
  const int p = static_cast<int>(phase);
  const auto& order = phase == Phase::forward ? forward_order_ : backward_order_;
  const int end = next < 0 ? static_cast<int>(order.size()) : position_[p][next];
  if (next >= 0) units_[next]->ran_[p] = true;
  for (int& position = passed_[p]; position < end; ++position) {
    FsdpModule& unit = *units_[order[position]];
    if (unit.ran_[p]) continue;
    if (position >= gathered_up_to_[p] && !current(unit)) issue_gather(unit);
    gathered_up_to_[p] = std::max(gathered_up_to_[p], position + 1);
    if (next >= 0 && encloses(unit, *units_[next])) continue;  // its turn is still to come
    prefetch_after(unit, phase);  // what follows, in the order in which a rank that ran it issues it
    if (phase == Phase::backward) drain_delayed_reductions();
    if (phase == Phase::forward) {
      if (!keep_after_forward(unit, at::GradMode::is_enabled())) reshard(unit);
      continue;
    }
    if (unit.trainable_count_ > 0 && unit.window_ == FsdpModule::Window::closed) {
      unit.open_window();
      unit.complete_window();
    }
    finish_backward_of(unit);
  }
  passed_[p] = std::max(passed_[p], end + (next < 0 ? 0 : 1));
  gathered_up_to_[p] = std::max(gathered_up_to_[p], passed_[p]);
}

}  // namespace fsdp
