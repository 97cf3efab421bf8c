// The part of Scheduler that follows a backward: its beginning and end, gradient windows, reduce slots, reductions.
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

#include "fsdp/base/check.h"
#include "fsdp/module/scheduler.h"

namespace fsdp {

// --- Backward ---

void Scheduler::ensure_backward_started(FsdpModule& unit) {
  if (!unit.options().register_hooks) return;
  const int task = torch::autograd::get_current_graph_task_id();
  if (backward_active_ && task == graph_task_) return;
  FSDP_CHECK(!backward_active_, UsageError,
             "the previous backward ended with an exception: call context->reset() on every rank before going on");
  backward_active_ = true;
  graph_task_ = task;
  torch::autograd::Engine::get_default_engine().queue_callback([this] { end_of_backward(); });
}

void Scheduler::pre_backward(FsdpModule& unit) {
  ensure_backward_started(unit);
  if (unit.in_backward_ && unit.gathered_) return;
  if (const int parent = parent_[unit.index()];
      parent >= 0 && !units_[parent]->in_backward_ && !units_[parent]->reduced_in_backward_) {
    pre_backward(*units_[parent]);  // outer before inner, whichever hook came first
  }
  need(unit, Phase::backward);
  if (unit.in_backward_) return;
  unit.in_backward_ = true;
  unit.backward_span_ = issue_compute_span(unit.names_.backward_compute);
}

void Scheduler::window_completed(FsdpModule& unit) {
  end_backward_span(unit);
  if (unit.options().register_hooks) {
    unit.in_backward_ = false;
    unit.reduced_in_backward_ = true;
    const bool keep = options_.keep_first && unit.index() == first_owner_ && !unit.last_microbatch_;
    if (!keep) reshard(unit);
    reduce(unit);
  }
  for (auto& hook : unit.post_backward_hooks_) hook(unit);
}

trace::Span* Scheduler::issue_compute_span(const char* name) const {
  // Where operators are recorded one by one, a span over the unit would count its waits as compute.
  const bool by_operator = runtime().device().is_meta();
  return issue_span(name, by_operator ? trace::Kind::unit : trace::Kind::compute, compute_stream());
}

void Scheduler::end_backward_span(FsdpModule& unit) const {
  if (unit.backward_span_ != nullptr) unit.backward_span_->end = compute_stream().now();
  unit.backward_span_ = nullptr;
}

void Scheduler::close_open_windows() {
  for (int index : backward_order_) {
    FsdpModule& unit = *units_[index];
    if (!unit.options().register_hooks || unit.trainable_count_ == 0) continue;
    const bool untouched = unit.window_ == FsdpModule::Window::closed && !unit.reduced_in_backward_;
    const bool owed = std::any_of(unit.groups_.begin(), unit.groups_.end(),
                                  [](const auto& group) { return group->has_accumulated(); });
    // Its backward ran and no gradient came, or earlier microbatches left gradients that only the last one reduces.
    if (untouched && (unit.in_backward_ || (owed && microbatch_.is_last))) unit.open_window();
    if (unit.window_ == FsdpModule::Window::open) unit.complete_window();
  }
}

void Scheduler::end_of_backward() {
  close_open_windows();
  drain_reductions(0);
  drain_releases(0);
  for (auto& unit : units_) {
    end_backward_span(*unit);
    unit->in_backward_ = false;
    unit->reduced_in_backward_ = false;
    const bool keep = options_.keep_first && unit->index() == first_owner_ && !microbatch_.is_last;
    if (unit->options().register_hooks && !keep) release(*unit);
  }
  recorded_.end();
  join();
  backward_active_ = false;
  awaiting_backward_ = false;
  weights_may_change_ = microbatch_.is_last;
  if (microbatch_.is_last) end_of_step();
}

void Scheduler::join() {
  Event reduced, gathered;
  reduce_stream_.record(reduced);
  gather_stream_.record(gathered);  // a gather nobody read must not meet the optimizer's writes
  compute_stream().wait(reduced);
  compute_stream().wait(gathered);
  for (auto& slot : slots_) recycle(slot);
}

void Scheduler::end_of_step() {
  for (auto& unit : units_) {
    for (auto& group : unit->groups()) group->drop_unused_gradients();
  }
}

void Scheduler::finish_grad_sync() {
  for (const auto& unit : units_) {
    FSDP_CHECK(unit->window_ != FsdpModule::Window::open, UsageError,
               "finish_grad_sync: unit \"{}\" still waits for {} of {} gradients; every trainable parameter must take "
               "part in each backward",
               unit->name(), unit->pending_, unit->trainable_count_);
    FSDP_CHECK(unit->window_ != FsdpModule::Window::complete, UsageError,
               "finish_grad_sync: the gradients of unit \"{}\" are complete but were never reduced; call "
               "reduce_gradients() in its post-backward hook",
               unit->name());
  }
  drain_reductions(0);
  drain_releases(0);
  join();
  weights_may_change_ = microbatch_.is_last;
  if (microbatch_.is_last) end_of_step();
}

void Scheduler::check_gradients_reduced(const char* action) const {
  for (const auto& unit : units_) {
    for (const auto& group : unit->groups()) {
      FSDP_CHECK(!group->has_accumulated(), UsageError,
                 "{}: unit \"{}\" still holds gradients of microbatches that were not reduced: the last backward of a "
                 "step must not be under no_sync() or "
                 "microbatch({{.is_last = false}})",
                 action, unit->name());
    }
  }
}

void Scheduler::drop_accumulated() {
  for (auto& unit : units_) {
    for (auto& group : unit->groups()) group->drop_accumulated(accumulation_pool_);
  }
}

// --- Reduction ---

void Scheduler::take_slot(FsdpModule& unit) {
  // Two slots take turns. A unit with nested units collects gradients while those reduce, so it gets one of its own.
  const auto usable = [&](std::size_t i) { return !slots_[i].in_use; };
  std::size_t chosen = slots_.size();
  if (tree_.children[unit.index()].empty()) {
    while (!usable(0) && !usable(1) && !reductions_.empty()) drain_reductions(reductions_.size() - 1);
    if (usable(next_slot_))
      chosen = next_slot_;
    else if (usable(1 - next_slot_))
      chosen = 1 - next_slot_;
    if (chosen < 2) next_slot_ = 1 - chosen;
  }
  for (std::size_t i = 2; i < slots_.size() && chosen == slots_.size(); ++i) {
    if (usable(i)) chosen = i;
  }
  if (chosen == slots_.size()) slots_.emplace_back();
  ReduceSlot& slot = slots_[chosen];
  compute_stream().wait(slot.done);
  recycle(slot);
  slot.in_use = true;
  unit.slot_ = static_cast<int>(chosen);
  const auto live = [](const ReduceSlot& s) { return s.in_use || !s.memory.empty(); };
  const int leaf_slots = live(slots_[0]) + live(slots_[1]);
  counters_.peak_reduce_slots = std::max(counters_.peak_reduce_slots, leaf_slots);
}

void Scheduler::recycle(ReduceSlot& slot) {
  if (slot.in_use) return;
  for (auto& [memory, size] : slot.memory) slot_pool_.release(std::move(memory), size);
  slot.memory.clear();
}

void Scheduler::reduce(FsdpModule& unit) {
  FSDP_CHECK(unit.window_ == FsdpModule::Window::complete, UsageError,
             "reduce_gradients: unit \"{}\" has no complete gradients to reduce ({} of {} have arrived)", unit.name(),
             unit.trainable_count_ - unit.pending_, unit.trainable_count_);
  if (options_.reduction.delay > 0) {
    unit.window_ = FsdpModule::Window::queued;
    reductions_.push_back(&unit);
  } else {
    launch_reduction(unit);
  }
}

void Scheduler::drain_reductions(std::size_t target) {
  while (reductions_.size() > target) {
    FsdpModule& unit = *reductions_.front();
    reductions_.pop_front();
    launch_reduction(unit);
  }
}

void Scheduler::launch_queued(FsdpModule& unit) {
  while (unit.window_ == FsdpModule::Window::queued) drain_reductions(reductions_.size() - 1);
}

void Scheduler::launch_reduction(FsdpModule& unit) {
  trace::Span* span = issue_span(unit.names_.reduce_gradients, trace::Kind::unit, reduce_stream_);
  reduce_stream_.wait(unit.packed_event_);
  for (auto& group : unit.groups_) {
    if (!group->trainable()) continue;
    group->reduce(reduce_stream_, slot_pool_, accumulation_pool_, unit.names_.reduce_gradients);
    if (auto memory = group->take_slot_memory(); memory.get() != nullptr || unit.slot_ >= 0) {
      if (unit.slot_ >= 0) slots_[unit.slot_].memory.emplace_back(std::move(memory), group->slot_bytes());
    }
  }
  if (unit.slot_ >= 0) {
    reduce_stream_.record(slots_[unit.slot_].done);
    slots_[unit.slot_].in_use = false;
    unit.slot_ = -1;
  }
  if (span != nullptr) span->end = reduce_stream_.now();
  unit.window_ = FsdpModule::Window::closed;
  ++counters_.reductions;
}

}  // namespace fsdp
