// The part of Scheduler that follows a backward: its beginning and end, gradient windows, reduce slots, reductions.
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

#include "fsdp/base/check.h"
#include "fsdp/base/log.h"
#include "fsdp/module/backward_watch.h"
#include "fsdp/module/recompute_state.h"
#include "fsdp/module/scheduler.h"

namespace fsdp {

// --- Backward ---

void Scheduler::ensure_backward_started(FsdpModule& unit) {
  if (!unit.options().register_hooks) return;
  RecomputeState& recomputing = recompute_state();
  if (recomputing.depth > 0 &&
      std::find(recomputing.schedulers.begin(), recomputing.schedulers.end(), this) == recomputing.schedulers.end())
    recomputing.schedulers.push_back(this);
  const int task = backward_task();
  if (backward_active_ && task == graph_task_) return;
  FSDP_CHECK(!backward_active_, UsageError,
             "the previous backward ended with an exception (or this one runs inside another): call context->reset() "
             "on every rank before going on");
  note_weight_versions();
  const auto* chosen = torch::autograd::get_current_graph_task_exec_info();
  selective_backward_ = chosen != nullptr && !chosen->empty();
  if (at::GradMode::is_enabled()) watched_before_backward_ = backward_watch::enter(nullptr, 0);
  backward_active_ = true;
  graph_task_ = task;
  owes_prefetch_ = nullptr;
  backward_prefetches_ = false;
  begin_pass(Phase::backward);
  const auto at_end = [this] { end_of_backward(); };
  if (recomputing.depth > 0)
    recomputing.at_end->emplace_back(at_end);
  else
    torch::autograd::Engine::get_default_engine().queue_callback(at_end);
}

void Scheduler::pre_backward(FsdpModule& unit) {
  ensure_backward_started(unit);
  const bool reads = reads_weights(unit, Phase::backward);
  if (unit.in_backward_ && !reads) return;
  if (unit.in_backward_ && current(unit)) return wait_for_weights(unit);  // perhaps only prefetched
  if (unit.nodes_generation_ == generation_) pass_units_made_after(unit.end_of_nodes_, unit);
  if (const int parent = parent_[unit.index()];
      parent >= 0 && !units_[parent]->in_backward_ && !units_[parent]->finished_) {
    pre_backward(*units_[parent]);  // outer before inner, whichever hook came first
  }
  drop_finished_before(unit);
  need(unit, Phase::backward);
  if (!unit.in_backward_) begin_backward_of(unit);
}

// Units whose gradients are complete have hardly anything left to run. Should a node of theirs need weights all the
// same, it gathers them again.
void Scheduler::drop_finished_before(const FsdpModule& next) {
  for (FsdpModule* other : in_backward_) {
    const bool over = other != &next && gradients_complete(*other) && !encloses(*other, next);
    if (over && other->gathered_ && !keep_for_next_microbatch(*other)) reshard(*other);
  }
}

void Scheduler::begin_backward_of(FsdpModule& unit) {
  unit.in_backward_ = true;
  unit.finished_ = false;
  in_backward_.push_back(&unit);
  line_up(unit);
  if (const int depth = recompute_state().depth; depth > 0) began_nested_.emplace_back(&unit, depth);
  if (at::GradMode::is_enabled())
    backward_watch::enter(&unit, unit.weight_version_);  // nodes of a second backward are the unit's as well
  unit.backward_span_ = issue_compute_span(unit.names_.backward_compute);
  unit.backward_range_ = begin_range(unit.names_.backward_compute);
}

// The hooks on outputs come first; this is for backwards that enter elsewhere, and to see that units have been passed.
// Exceptions cannot leave from here.
void Scheduler::before_node(FsdpModule& unit, std::uint64_t number, std::uint64_t version) {
  Scheduler& scheduler = unit.scheduler_;
  if (!unit.options().register_hooks) return;
  try {
    if (!unit.finished_) {
      if (scheduler.backward_active_) scheduler.pass_units_made_after(number, unit);
      const bool lacks_weights =
          reads_weights(unit, Phase::backward) && (!scheduler.current(unit) || !scheduler.waited_for(unit));
      if (!unit.in_backward_ || lacks_weights) scheduler.pre_backward(unit);
    }
    FSDP_CHECK(
        version == unit.weight_version_, UsageError,
        "the weights of unit \"{}\" were written between a forward and its backward, which would use those of both: "
        "write them after the backward",
        unit.name());
  } catch (const std::exception& error) {
    if (!scheduler.backward_error_) scheduler.backward_error_ = std::current_exception();
    for (auto& group : unit.groups_) group->explain_release(error.what());  // what the node then throws
    scheduler.drop_own(unit);
  }
}

void Scheduler::pass_units_made_after(std::uint64_t number, const FsdpModule& next) {
  for (std::size_t i = 0; i < in_backward_.size();) {
    FsdpModule& unit = *in_backward_[i];
    const bool passed = &unit != &next && unit.nodes_generation_ == generation_ && unit.first_node_ >= number;
    if (!passed) {
      ++i;
      continue;
    }
    backward_passed(unit);
  }
}

bool Scheduler::gradients_complete(const FsdpModule& unit) const {
  return unit.trainable_count_ == 0 || unit.window_ == FsdpModule::Window::complete || unit.reduced_ ||
         selective_backward_;
}

void Scheduler::backward_passed(FsdpModule& unit) {
  if (!backward_active_ || !unit.in_backward_) return;
  if (!gradients_complete(unit)) {
    unit.open_window();
    unit.complete_window();
  }
  finish_backward_of(unit);
}

// Nothing of the unit is still to run: its weights can go.
void Scheduler::finish_backward_of(FsdpModule& unit) {
  end_backward_span(unit);
  std::erase(in_backward_, &unit);
  unit.in_backward_ = false;
  unit.finished_ = true;
  if (!keep_for_next_microbatch(unit)) reshard(unit);
}

void Scheduler::nested_backward_ended(int depth) {
  while (!began_nested_.empty() && began_nested_.back().second >= depth) {
    FsdpModule& unit = *began_nested_.back().first;
    began_nested_.pop_back();
    backward_passed(unit);
  }
}

// Weights stay: they may be needed for the gradients of inputs, frozen ones above all.
void Scheduler::window_completed(FsdpModule& unit) {
  if (owes_prefetch_ == &unit) pay_prefetch();  // before the reduction, on every rank
  if (unit.options().register_hooks)
    issue_reductions_in_order(/*at_end=*/false);
  else
    end_backward_span(unit);
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
  if (unit.backward_range_ != 0) end_range(std::exchange(unit.backward_range_, 0));
}

void Scheduler::close_open_windows() {
  for (int index : backward_order_) {
    FsdpModule& unit = *units_[index];
    if (!unit.options().register_hooks || unit.trainable_count_ == 0) continue;
    const bool untouched = !selective_backward_ && unit.window_ == FsdpModule::Window::closed && !unit.reduced_;
    const bool owed = std::any_of(unit.groups_.begin(), unit.groups_.end(),
                                  [](const auto& group) { return group->has_accumulated(); });
    // Its backward ran and no gradient came, or earlier microbatches left gradients that only the last one reduces.
    if (untouched && (unit.in_backward_ || (owed && microbatch_.is_last))) unit.open_window();
    if (unit.window_ == FsdpModule::Window::open) unit.complete_window();
  }
}

void Scheduler::end_of_backward() {
  const auto error = std::exchange(backward_error_, nullptr);
  if (error) std::rethrow_exception(error);  // the backward stays unfinished, as after any exception
  if (options_.skipped_units == SkippedUnits::participate && !selective_backward_) catch_up(Phase::backward, -1);
  close_open_windows();
  issue_reductions_in_order(/*at_end=*/true);
  drain_reductions(0);
  drain_releases(0);
  bool reduced = false;
  for (auto& unit : units_) {
    end_backward_span(*unit);
    reduced |= unit->reduced_;
    unit->in_backward_ = unit->finished_ = unit->reduced_ = false;
    if (unit->options().register_hooks && !keep_for_next_microbatch(*unit)) release(*unit);
  }
  in_backward_.clear();
  recomputed_.clear();
  began_nested_.clear();
  recorded_.end();
  join_after_step();
  backward_active_ = false;
  if (at::GradMode::is_enabled())
    backward_watch::enter(watched_before_backward_,
                          watched_before_backward_ == nullptr ? 0 : watched_before_backward_->weight_version_);
  // Gradients for chosen inputs are no microbatch: its backward is still to come.
  if (selective_backward_ && !reduced) return;
  end_of_microbatch();
}

void Scheduler::end_of_microbatch() {
  ++generation_;
  awaiting_backward_ = false;
  weights_may_change_ = microbatch_.is_last;
  ++microbatches_;
  if (microbatch_.is_last) end_of_step();
}

void Scheduler::join_gathers() {
  if (microbatch_.is_last) settle_reads();
  Event gathered;
  gather_stream_.record(gathered);  // a gather nobody read must not meet the optimizer's writes
  compute_stream().wait(gathered);
}

void Scheduler::join_reductions() {
  Event reduced;
  reduce_stream_.record(reduced);
  compute_stream().wait(reduced);
  unjoined_.clear();
  accumulation_pool_.collect();
  for (auto& slot : slots_) recycle(slot);
}

void Scheduler::join_after_step() {
  join_gathers();
  if (!options_.overlap_optimizer || !microbatch_.is_last || selective_backward_) return join_reductions();
  if (!unjoined_.empty()) unjoined_versions_ = note_weight_versions();
}

void Scheduler::wait_for_gradients(FsdpModule& unit) {
  if (std::erase(unjoined_, &unit) == 0) return;
  compute_stream().wait(unit.reduced_event_);
  if (unjoined_.empty()) join_reductions();
}

// Before weights are read again. Whoever wrote them, or dropped gradients, looked at what nobody had waited for.
void Scheduler::join_left_over() {
  if (unjoined_.empty()) return;
  FSDP_CHECK(
      note_weight_versions() == unjoined_versions_ && any_gradient_defined(), UsageError,
      "ContextOptions::overlap_optimizer: weights or gradients were written after a backward whose reductions "
      "nobody waited for. Update them with fsdp::AdamW or fsdp::Sgd, or call context->wait_for_gradients() first");
  join_reductions();
}

void Scheduler::end_of_step() {
  for (auto& unit : units_) {
    for (auto& group : unit->groups()) {
      if (!group->used_all()) wait_for_gradients(*unit);  // its gradients are looked at now
      counters_.waits_for_device += group->drop_unused_gradients() ? 1 : 0;
    }
    if (unit->options().register_hooks) rest(*unit);
  }
  ++step_;
  microbatches_ = 0;
  warn_if_nobody_steps();
}

// An optimizer over the module's own parameters trains nothing: gradients pile up in leaves that never change.
void Scheduler::warn_if_nobody_steps() {
  constexpr std::int64_t kSuspicious = 3;
  if (!gradients_at_epoch_start_ || idle_steps_ < 0) {
    if (idle_steps_ > 0) idle_steps_ = 0;
    return;
  }
  if (runtime().capturing()) return;  // reading a weight would wait for the device
  if (++idle_steps_ != 1 && idle_steps_ != kSuspicious) return;
  std::vector<double> samples;
  for (const auto& unit : units_) {
    for (const auto& group : unit->groups()) {
      for (const auto& p : group->parameters()) {
        if (p.leaf.numel() > 0 && group->trainable() && !p.leaf.is_meta())
          samples.push_back(p.leaf.detach().flatten()[0].item<double>());
      }
    }
  }
  if (idle_steps_ == 1) {
    samples_ = std::move(samples);
    return;
  }
  idle_steps_ = samples == samples_ && !samples.empty() ? -1 : 0;  // -1: said once
  if (idle_steps_ < 0) {
    log::write(log::Level::warning,
               fmt::format("fsdp: rank {}: the gradients of {} steps were reduced, but no weight has changed and no "
                           "gradient was zeroed. An optimizer must be made over context->parameters(), not over "
                           "model->parameters(), which hold no data while sharded",
                           mesh_.world().rank().value(), kSuspicious));
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
  for (const auto& unit : units_) {
    const bool left = !unit->options().register_hooks && unit->releasable_ && unit->gathered_ && unit->pins_ == 0 &&
                      unit->borrowers_ == 0 && unit->options().reshard != Reshard::never;
    FSDP_CHECK(!left || !microbatch_.is_last, UsageError,
               "finish_grad_sync: unit \"{}\" is still gathered at the end of the step: call reshard() after its last "
               "use, or set its reshard policy to never",
               unit->name());
  }
  join_after_step();
  end_of_microbatch();
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

BufferPool::Source Scheduler::take_slot(FsdpModule& unit) {
  // Two slots take turns. A unit with nested units collects gradients while those reduce, so it gets one of its own; of
  // these the one that was reduced longest ago, if another is left, so that nobody waits for the reduction just issued.
  const auto usable = [&](std::size_t i) { return !slots_[i].in_use; };
  std::size_t chosen = slots_.size();
  if (tree_.children[unit.index()].empty() && !unit.lends_) {
    while (!usable(0) && !usable(1) && !reductions_.empty()) drain_reductions(reductions_.size() - 1);
    if (usable(next_slot_))
      chosen = next_slot_;
    else if (usable(1 - next_slot_))
      chosen = 1 - next_slot_;
    if (chosen < 2) next_slot_ = 1 - chosen;
  }
  if (chosen == slots_.size()) {
    int unused = 0;
    for (std::size_t i = 2; i < slots_.size(); ++i) {
      if (!usable(i)) continue;
      ++unused;
      if (chosen == slots_.size() || slots_[i].last_use < slots_[chosen].last_use) chosen = i;
    }
    if (unused < 2) {
      chosen = slots_.size();
      slots_.emplace_back();
    }
  }
  ReduceSlot& slot = slots_[chosen];
  compute_stream().wait(slot.done);
  recycle(slot);
  slot.in_use = true;
  unit.slot_ = static_cast<int>(chosen);
  const auto live = [](const ReduceSlot& s) { return s.in_use || !s.memory.empty(); };
  const int leaf_slots = live(slots_[0]) + live(slots_[1]);
  counters_.peak_reduce_slots = std::max(counters_.peak_reduce_slots, leaf_slots);
  // When a unit with nested units, or a lender, takes its slot depends on which parameters this rank used: then it must
  // not shift what lies where in the arena.
  return chosen < 2 ? BufferPool::Source::arena : BufferPool::Source::allocator;
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

void Scheduler::drain_delayed_reductions() {
  if (options_.reduction.delay > 0) drain_reductions(static_cast<std::size_t>(options_.reduction.delay - 1));
}

void Scheduler::line_up(FsdpModule& unit) {
  if (unit.lined_up_ || !unit.options().register_hooks || unit.trainable_count_ == 0) return;
  unit.lined_up_ = true;
  line_.push_back(&unit);
}

bool Scheduler::encloses(const FsdpModule& outer, const FsdpModule& inner) const {
  for (int index = parent_[inner.index()]; index >= 0; index = parent_[index]) {
    if (index == outer.index()) return true;
  }
  return false;
}

bool Scheduler::nested_units_reduced(const FsdpModule& unit) const {
  return std::all_of(tree_.children[unit.index()].begin(), tree_.children[unit.index()].end(), [&](int child) {
    const FsdpModule& nested = *units_[child];
    return nested.trainable_count_ > 0 ? nested.reduced_ : nested_units_reduced(nested);
  });
}

// A unit's gradients may be complete early on one rank and late on another, where a parameter was not used. So that all
// ranks issue their reductions in one order, units are reduced in the order in which their backwards began, a unit
// after those nested in it, and one that lends weights at the end of backward. Where nothing is unused, none waits.
void Scheduler::issue_reductions_in_order(bool at_end) {
  for (bool changed = true; changed && !line_.empty();) {
    changed = false;
    std::size_t kept = 0;
    for (std::size_t i = 0; i < line_.size(); ++i) {
      FsdpModule& unit = *line_[i];
      bool ready = unit.window_ == FsdpModule::Window::complete && !unit.lends_;
      if (ready && !at_end) ready = nested_units_reduced(unit);
      for (std::size_t k = i + 1; k < line_.size() && ready && at_end; ++k) ready = !encloses(unit, *line_[k]);
      for (std::size_t k = 0; k < kept && ready; ++k) ready = line_[k]->lends_ || encloses(*line_[k], unit);
      if (!ready) {
        line_[kept++] = &unit;
        continue;
      }
      changed = true;
      unit.lined_up_ = false;
      unit.reduced_ = true;
      reduce(unit);
    }
    line_.resize(kept);
  }
  if (!at_end) return;
  std::sort(line_.begin(), line_.end(), [](auto* a, auto* b) { return a->index() < b->index(); });
  for (FsdpModule* unit : line_) {
    unit->lined_up_ = false;
    if (unit->window_ != FsdpModule::Window::complete) continue;  // of a backward for chosen inputs
    unit->reduced_ = true;
    reduce(*unit);
  }
  line_.clear();
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
    slots_[unit.slot_].last_use = ++slot_uses_;
    slots_[unit.slot_].in_use = false;
    unit.slot_ = -1;
  }
  if (span != nullptr) span->end = reduce_stream_.now();
  if (options_.overlap_optimizer) {
    reduce_stream_.record(unit.reduced_event_);
    std::erase(unjoined_, &unit);
    unjoined_.push_back(&unit);
  }
  unit.window_ = FsdpModule::Window::closed;
  ++counters_.reductions;
}

}  // namespace fsdp
