// The part of Scheduler that decides which weights are gathered, and which ahead, when a unit is needed.
#include <algorithm>
#include <optional>
#include <span>
#include <utility>

#include "fsdp/module/scheduler.h"

namespace fsdp {

void Scheduler::prefetch_after(FsdpModule& unit, Phase phase) {
  const auto& policy = options_.prefetch;
  std::span<const int> targets;
  if (policy.kind == Prefetch::Kind::recorded) targets = recorded_.need(unit.index(), policy.amount);
  if (targets.empty()) targets = prefetch_table_.after(phase, unit.index());
  for (int index : targets) {
    FsdpModule& target = *units_[index];
    if (current(target)) continue;
    if (phase == Phase::backward && (!reads_weights(target, phase) || has_no_backward(target))) continue;
    if (policy.budget && gathered_bytes_ + target.gathered_bytes_ > *policy.budget) break;
    issue_gather(target);
    if (options_.skipped_units == SkippedUnits::participate) {
      int& up_to = gathered_up_to_[static_cast<int>(phase)];
      up_to = std::max(up_to, position_[static_cast<int>(phase)][index] + 1);
    }
    ++counters_.prefetched;
  }
}

// No gradient of a weight, nor of an input, passes through it. By what all ranks have in common: units in the middle
// may get other inputs on one rank.
bool Scheduler::has_no_backward(const FsdpModule& unit) const {
  return !unit.expects_backward_ && position_[static_cast<int>(Phase::forward)][unit.index()] < first_trainable_ &&
         options_.skipped_units == SkippedUnits::error;
}

bool Scheduler::reads_weights(const FsdpModule& unit, std::optional<Phase> phase) {
  if (phase != Phase::backward || unit.backward_reads_weights_ || !unit.lenders_.empty()) return true;
  // Ranks that skip the unit cannot know whether others recompute it, for which they gather it.
  return unit.scheduler_.options_.skipped_units == SkippedUnits::participate;
}

// The current stream may read the unit's weights from here on. The next gather is issued before anything computes and
// before any release, so that it does not queue behind either.
void Scheduler::need(FsdpModule& unit, std::optional<Phase> phase) {
  if (phase) catch_up(*phase, unit.index());
  const bool reads = reads_weights(unit, phase);
  if (reads) issue_gather(unit);
  const bool late = phase == Phase::backward && options_.late_first_prefetch && in_backward_.empty() &&
                    !std::exchange(backward_prefetches_, true);
  if (late && unit.trainable_count_ > 0) {
    owes_prefetch_ = &unit;
  } else if (phase) {
    pay_prefetch();
    prefetch_after(unit, *phase);
  }
  if (phase == Phase::backward) drain_delayed_reductions();
  if (reads) wait_for_weights(unit);
}

void Scheduler::pay_prefetch() {
  if (owes_prefetch_ != nullptr) prefetch_after(*std::exchange(owes_prefetch_, nullptr), Phase::backward);
}

void Scheduler::gradient_arrived(FsdpModule& unit) {
  if (owes_prefetch_ == &unit && 2 * unit.pending_ <= unit.trainable_count_) pay_prefetch();
}

}  // namespace fsdp
