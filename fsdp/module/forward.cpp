// The part of Scheduler that follows a forward: its beginning and end, which weights stay for the backward.
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

#include "fsdp/base/check.h"
#include "fsdp/module/backward_watch.h"
#include "fsdp/module/recompute_state.h"
#include "fsdp/module/scheduler.h"

namespace fsdp {

void Scheduler::begin_outermost_forward() {
  if (backward_task() != -1) return;  // recomputing inside a backward
  FSDP_CHECK(!backward_active_, UsageError,
             "the previous backward ended with an exception: call context->reset() on every rank before going on");
  if (options_.check) verify_parameters();
  begin_epoch_if_needed();
  backward_expected_ = false;
  begin_pass(Phase::forward);
}

void Scheduler::pre_forward(FsdpModule& unit) {
  if (!finalized_) finalize();
  for (const auto& group : unit.groups_) group->check_usable();
  FSDP_CHECK(!unit.buffers_on_meta_, UsageError,
             "unit \"{}\" has buffers on the meta device and without values: call context->materialize(init) first",
             unit.name());
  if (forward_depth_ == 0) begin_outermost_forward();
  if (options_.skipped_units == SkippedUnits::participate && recompute_state().tracks_later) {
    const FsdpModule*& first = recompute_state().first_unit;
    FSDP_CHECK(
        first == nullptr || first == &unit, UsageError,
        "SkippedUnits::participate: units \"{}\" and \"{}\" run inside one recomputed function, whose second run "
        "would gather them in another order than ranks that skip them: recompute each unit by itself",
        first->name(), unit.name());
    first = &unit;
  }
  catch_up(backward_task() == -1 ? Phase::forward : Phase::backward, unit.index());
  issue_gather(unit);
  if (unit.forwards_left_ == 0) unit.forwards_left_ = static_cast<int>(unit.modules_.size());
  ++forward_depth_;  // last: from here on the caller's scope undoes it
}

// After the arguments were seen: what follows is prefetched, then the current stream waits for the weights.
void Scheduler::start_forward(FsdpModule& unit) {
  if (options_.prefetch.kind == Prefetch::Kind::recorded && forward_depth_ == 1 && !recorded_.active()) {
    // Equal on all ranks, whatever the shapes of their data: the root, and whether it trains.
    recorded_.begin(static_cast<std::uint64_t>(unit.index()) * 2 + (at::GradMode::is_enabled() ? 1 : 0));
  }
  if (backward_task() == -1) return need(unit, Phase::forward);
  // Recomputing inside a backward: what comes next in forward was computed long ago. Units recomputed before this one
  // wait for their backward without weights; the last one keeps them, for its backward follows at once.
  need(unit, std::nullopt);
  for (FsdpModule* other : recomputed_) {
    if (other != &unit && other->forwards_left_ == 0 && !keep_for_next_microbatch(*other)) reshard(*other);
  }
  recomputed_.clear();
}

// Frozen and kept: whether or not a backward comes.
bool Scheduler::stays_over_microbatches(const FsdpModule& unit) const {
  return unit.options().reshard == Reshard::never && unit.trainable_count_ == 0 && !microbatch_.is_last;
}

bool Scheduler::keep_for_next_microbatch(const FsdpModule& unit) const {
  const bool first = options_.keep_first && unit.index() == first_owner_;
  return (first && !microbatch_.is_last) || stays_over_microbatches(unit);
}

bool Scheduler::keep_after_forward(FsdpModule& unit, bool backward_expected) {
  if (stays_over_microbatches(unit)) return true;
  if (!backward_expected || !reads_weights(unit, Phase::backward)) return false;
  if (unit.index() == last_owner_ && options_.keep_last) return true;
  switch (unit.options().reshard) {
    case Reshard::automatic:
      return unit.index() == tree_.roots.back();
    case Reshard::after_forward:
      return false;
    case Reshard::never:
      return true;
    case Reshard::by_budget:
      if (unit.kept_) return true;
      if (!options_.keep_budget || kept_bytes_ + unit.gathered_bytes_ > *options_.keep_budget) return false;
      kept_bytes_ += unit.gathered_bytes_;
      unit.kept_ = true;
      return true;
  }
  return false;
}

// What one rank made of a unit's nodes, all others did too: the numbers may differ, their order does not.
void Scheduler::note_nodes(FsdpModule& unit, std::uint64_t begin) const {
  if (unit.nodes_generation_ != generation_) unit.first_node_ = begin;
  unit.nodes_generation_ = generation_;
  unit.end_of_nodes_ = backward_watch::next_number();
}

void Scheduler::post_forward(FsdpModule& unit, bool backward_expected, std::uint64_t first_node) {
  backward_expected_ |= backward_expected;
  if (at::GradMode::is_enabled() && backward_task() == -1) note_nodes(unit, first_node);
  if (backward_task() == -1) {
    if (std::exchange(unit.expectation_generation_, generation_) != generation_) unit.expects_backward_ = false;
    unit.expects_backward_ |= backward_expected;
  }
  --unit.forwards_left_;
  if (backward_task() != -1) {
    recomputed_.push_back(&unit);
  } else if (unit.forwards_left_ == 0 && !keep_after_forward(unit, backward_expected)) {
    reshard(unit);  // a unit of several modules drops its weights when the last of them has run
  }
  if (--forward_depth_ == 0) end_outermost_forward();
}

void Scheduler::end_outermost_forward() {
  if (backward_task() != -1) return;
  catch_up(Phase::forward, -1);
  for (auto& unit : units_) {
    if (unit->forwards_left_ == 0) continue;  // some modules of the unit were not called
    unit->forwards_left_ = 0;
    if (!backward_expected_) reshard(*unit);
  }
  if (backward_expected_) {
    awaiting_backward_ = true;
    return;
  }
  release_all();  // nothing stays gathered or in flight after an evaluation
  recorded_.end();
  join_reads();
}

void Scheduler::abandon_forward(FsdpModule& unit) {
  unit.forwards_left_ = 0;
  --forward_depth_;
  recorded_.discard();
}

}  // namespace fsdp
