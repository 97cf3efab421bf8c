#include "fsdp/module/scheduler.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

#include "fsdp/base/check.h"
#include "fsdp/module/backward_watch.h"

namespace fsdp {

Scheduler::Scheduler(DeviceMesh mesh, ContextOptions options)
    : mesh_(std::move(mesh)),
      options_(std::move(options)),
      gather_stream_(mesh_.runtime()->make_stream("gather")),
      reduce_stream_(options_.unify_communication_stream ? gather_stream_ : mesh_.runtime()->make_stream("reduce")),
      gather_pool_(mesh_.runtime(), gather_stream_),
      slot_pool_(mesh_.runtime()),
      accumulation_pool_(mesh_.runtime()),
      slots_(2) {
  FSDP_CHECK(options_.prefetch.amount >= 0, UsageError, "prefetch amount {} is negative", options_.prefetch.amount);
  FSDP_CHECK(options_.reduction.delay >= 0, UsageError, "reduction delay {} is negative", options_.reduction.delay);
  FSDP_CHECK(options_.recorder == nullptr || mesh_.runtime()->kernels() == nullptr, UsageError,
             "ContextOptions::recorder: on a GPU the host does not see when something runs; use fsdp::profile_device");
  if (options_.recorder) mesh_.runtime()->set_recorder(options_.recorder);
  backward_watch::install(&Scheduler::before_node);
  for (int axis = 0; axis < mesh_.axis_count(); ++axis) {
    mesh_.communicator(axis, Use::gather).set_inline_limit(options_.inline_limit);
    mesh_.communicator(axis, Use::reduce).set_inline_limit(options_.inline_limit);
    if (!options_.check) continue;
    for (Use use : {Use::gather, Use::reduce}) mesh_.communicator(axis, use).set_check(true);
  }
}

Scheduler::~Scheduler() {
  if (std::uncaught_exceptions() > 0 && mesh_.runtime()->kernels() != nullptr) {
    // What runs on a GPU may wait for a peer that will never come, and peers may still reach into this memory.
    static_cast<void>(arena_.release());
    static_cast<void>(new std::vector<Peers>(std::move(peers_)));
    static_cast<void>(new auto(std::move(inboxes_)));
    return;
  }
  for (const Stream* stream : {&gather_stream_, &reduce_stream_}) {
    try {
      stream->synchronize();
    } catch (const std::exception&) {  // it was thrown to whoever waited, or nobody will
    }
  }
  if (arena_ == nullptr && peers_.empty() && inboxes_.empty()) return;
  try {
    runtime().synchronize();  // a replay of a captured step uses this memory too, on whatever stream
    // Leaves and the module's tensors may live on: what they look at leaves the arena.
    for (auto& unit : units_) {
      drop_own(*unit);
      for (auto& group : unit->groups_) {
        if (group->reads_peers())
          group->use_peers(nullptr, 0);
        else if (arena_ != nullptr && group->releasable())
          group->move_model_weight(nullptr);
      }
    }
    compute_stream().synchronize();
  } catch (const std::exception&) {  // as above
  }
  for (const auto& group : arena_groups_) group->deregister_symmetric(arena_->base());
  peers_.clear();
  inboxes_.clear();
}

trace::Span* Scheduler::issue_span(const char* name, trace::Kind kind, const Stream& stream) const {
  auto* recorder = runtime().recorder();
  if (recorder == nullptr) return nullptr;
  trace::Span* span = recorder->issue(name, kind, stream.id());
  span->begin = stream.now();
  return span;
}

// --- Weights ---

bool Scheduler::any_gradient_defined() const {
  return std::any_of(units_.begin(), units_.end(), [](const auto& unit) {
    return std::any_of(unit->groups().begin(), unit->groups().end(),
                       [](const auto& group) { return group->any_gradient_defined(); });
  });
}

// Gathers from here on read what the optimizer, or whoever else, has written so far.
void Scheduler::begin_epoch_if_needed() {
  join_left_over();
  Event written;
  compute_stream().record(written);
  gather_stream_.wait(written);
  follow_requires_grad();
  follow_compute_stream();
  stamp_operations();
  // Several forwards before one backward (two roots, a module run twice) read the same weights, unless a leaf changed.
  // Steps count on every rank, also where a rank's own shards are empty: all ranks must begin the same epochs.
  const auto versions = note_weight_versions() + updates_;
  // An optimizer needs gradients, so where there were none when the epoch began, none has stepped since.
  const bool shared = awaiting_backward_ && !gradients_at_epoch_start_;
  if (versions == leaf_versions_ && epoch_ > 0 && (shared || !weights_may_change_)) return;
  ++epoch_;
  awaiting_backward_ = false;
  gradients_at_epoch_start_ = any_gradient_defined();
  leaf_versions_ = versions;
  for (auto& unit : units_) {
    for (auto& group : unit->groups()) group->drop_gradient_memory();
  }
}

void Scheduler::follow_compute_stream() {
  const StreamBackend* current = compute_stream().backend();
  if (std::exchange(compute_backend_, current) == current) return;
  for (auto& unit : units_) {
    for (auto& group : unit->groups()) group->follow_compute_stream();
  }
}

void Scheduler::follow_requires_grad() {
  for (auto& unit : units_) {
    unit->trainable_count_ = 0;
    for (auto& group : unit->groups()) {
      group->follow_requires_grad();
      unit->trainable_count_ += group->expected_arrivals();
    }
  }
  // A root with nested units stands before them in the order and computes around them: it does not count.
  first_trainable_ = 0;
  for (std::size_t i = 0; i < forward_order_.size(); ++i) {
    const int index = forward_order_[i];
    const bool outer = parent_[index] < 0 && i + 1 < forward_order_.size() && parent_[forward_order_[i + 1]] == index;
    if (units_[index]->trainable_count_ > 0 && !outer) break;
    ++first_trainable_;
  }
}

void Scheduler::stamp_operations() {
  const Stamp stamp{step_, microbatches_, updates_, microbatch_.is_last};
  for (int axis = 0; axis < mesh_.axis_count(); ++axis) {
    for (Use use : {Use::gather, Use::reduce}) mesh_.communicator(axis, use).set_stamp(stamp);
  }
}

std::int64_t Scheduler::note_weight_versions() {
  std::int64_t sum = 0;
  for (auto& unit : units_) {
    unit->weight_version_ = 0;
    for (const auto& group : unit->groups())
      unit->weight_version_ += static_cast<std::uint64_t>(group->weight_version());
    sum += static_cast<std::int64_t>(unit->weight_version_);
  }
  for (auto& unit : units_) {
    for (const FsdpModule* lender : unit->lenders_) {
      for (const auto& group : lender->groups())
        unit->weight_version_ += static_cast<std::uint64_t>(group->weight_version());
    }
  }
  return sum;
}

void Scheduler::weights_changed() {
  for (auto& unit : units_) {
    for (auto& group : unit->groups()) group->note_write();
  }
}

void Scheduler::check_idle(const char* action) const {
  check_no_accumulation(action);
  FSDP_CHECK(!awaiting_backward_, UsageError, "{}: only between steps: a forward still waits for its backward", action);
}

void Scheduler::check_no_accumulation(const char* action) const {
  FSDP_CHECK(forward_depth_ == 0 && !backward_active_ && microbatches_ == 0, UsageError,
             "{}: only between steps: a forward, a backward or an accumulation over microbatches is under way", action);
}

void Scheduler::before_capture() {
  join_reads();
  published_epoch_ = -1;
  weights_changed();  // so that a replay reads leaves that were written since the capture
}

void Scheduler::before_replay() {
  join_gathers();  // one that nobody waited for must not meet the graph
  join_reductions();
  weights_changed();
  ++updates_;
  ++step_;
}

bool Scheduler::current(const FsdpModule& unit) const {
  const auto own = [&](const FsdpModule& u) { return u.groups_.empty() || (u.gathered_ && u.epoch_ == epoch_); };
  return own(unit) &&
         std::all_of(unit.lenders_.begin(), unit.lenders_.end(), [&](auto* lender) { return own(*lender); });
}

void Scheduler::issue_gather(FsdpModule& unit) {
  unit.held_ = true;
  for (FsdpModule* lender : unit.lenders_) {
    gather_own(*lender);
    if (!unit.borrowing_) ++lender->borrowers_;
  }
  unit.borrowing_ = !unit.lenders_.empty();
  gather_own(unit);
}

// Issues the gather of a unit unless its current weights are gathered or on their way.
void Scheduler::gather_own(FsdpModule& unit) {
  if (unit.groups_.empty()) return;
  if (unit.release_queued_) {  // wanted again before its delayed release
    std::erase(releases_, &unit);
    unit.release_queued_ = false;
  }
  if (unit.gathered_) {
    if (unit.epoch_ == epoch_) return;
    drop_own(unit);  // weights of an earlier step
  }
  trace::Span* span = issue_span(unit.names_.unshard, trace::Kind::unit, gather_stream_);
  const char* label = unit.names_.unshard;
  const bool reads =
      std::any_of(unit.groups_.begin(), unit.groups_.end(), [](const auto& group) { return group->reads_peers(); });
  if (reads && published_epoch_ != epoch_) publish_weights();
  unsettled_reads_ |= reads;
  counters_.one_sided_gathers += reads ? 1 : 0;
  for (auto& group : unit.groups_) group->refresh(epoch_, gather_stream_, label);
  if (arena_ != nullptr && unit.releasable_ && !arena_->has_room(unit.gathered_bytes_)) reclaim_slots();
  for (auto& group : unit.groups_) group->gather_whole(gather_pool_, gather_stream_, label);
  gather_stream_.record(unit.gathered_event_);
  if (span != nullptr) span->end = gather_stream_.now();
  unit.gathered_ = true;
  unit.waited_ = false;
  unit.epoch_ = epoch_;
  if (unit.releasable_) {
    gathered_bytes_ += unit.gathered_bytes_;
    counters_.peak_gathered_units = std::max(counters_.peak_gathered_units, ++gathered_units_);
  }
  ++counters_.unshards;
}

void Scheduler::release(FsdpModule& unit) {
  if (unit.pins_ == 0)
    drop(unit);
  else
    unit.release_queued_ = false;
}

bool Scheduler::in_use(const FsdpModule& unit) const {
  return forward_depth_ > 0 || (backward_active_ && unit.in_backward_) || awaiting_backward_;
}

void Scheduler::drop(FsdpModule& unit) {
  unit.held_ = false;
  if (unit.borrowing_) {
    unit.borrowing_ = false;
    for (FsdpModule* lender : unit.lenders_) {
      if (--lender->borrowers_ == 0 && !lender->held_ && lender->pins_ == 0) drop_own(*lender);
    }
  }
  if (unit.borrowers_ == 0)
    drop_own(unit);
  else
    unit.release_queued_ = false;
}

// Drops the gathered weights now. Their memory goes back on the gather stream, after all who read them.
void Scheduler::drop_own(FsdpModule& unit) {
  if (!unit.gathered_ || !unit.releasable_) return;  // what rests whole stays
  unit.gathered_ = false;
  trace::Span* span = issue_span(unit.names_.reshard, trace::Kind::unit, gather_stream_);
  if (!unit.release_queued_) compute_stream().record(unit.read_event_);
  unit.release_queued_ = false;
  gather_stream_.wait(unit.read_event_);
  for (auto& group : unit.groups_) group->release_whole(gather_pool_);
  if (span != nullptr) span->end = gather_stream_.now();
  gathered_bytes_ -= unit.gathered_bytes_;
  --gathered_units_;
  if (unit.kept_) kept_bytes_ -= unit.gathered_bytes_;
  unit.kept_ = false;
}

void Scheduler::rest(FsdpModule& unit) {
  if (!unit.gets_stale_ || unit.releasable_ || !unit.gathered_ || unit.pins_ > 0) return;
  for (auto& group : unit.groups_) group->release_whole(gather_pool_);
  unit.gathered_ = false;
}

void Scheduler::wait_for_weights(FsdpModule& unit) {
  const Stream compute = compute_stream();
  compute.wait(unit.gathered_event_);
  unit.waited_ = true;
  for (FsdpModule* lender : unit.lenders_) {
    compute.wait(lender->gathered_event_);
    lender->waited_ = true;
  }
}

bool Scheduler::waited_for(const FsdpModule& unit) const {
  return (unit.waited_ || unit.groups_.empty()) &&
         std::all_of(unit.lenders_.begin(), unit.lenders_.end(), [](auto* lender) { return lender->waited_; });
}

// A caller-driven step has no outermost forward: its first gather begins the epoch, finish_grad_sync ends it. In a step
// that was declared, later gathers wait for no compute.
void Scheduler::begin_use_by_caller(const FsdpModule& unit) {
  if (!finalized_) finalize();
  if (forward_depth_ > 0 || backward_active_) return;
  const bool driven = !unit.options().register_hooks;
  if (driven) {
    for (const auto& group : unit.groups_) group->check_usable();
  }
  if (driven && step_has_begun_) return;
  begin_epoch_if_needed();
  if (!driven) return;
  weights_may_change_ = false;
  step_has_begun_ = step_declared_;
}

void Scheduler::declare_step(bool under_way) {
  if (!under_way) join_reads();
  step_declared_ = under_way;
  step_has_begun_ = false;
}

void Scheduler::unshard(FsdpModule& unit, std::optional<Phase> prefetch) {
  begin_use_by_caller(unit);
  need(unit, prefetch);
}

void Scheduler::gather(FsdpModule& unit) {
  begin_use_by_caller(unit);
  issue_gather(unit);
}

void Scheduler::reshard(FsdpModule& unit) {
  if ((!unit.gathered_ && !unit.borrowing_) || unit.release_queued_) return;
  if (options_.prefetch.kind == Prefetch::Kind::delayed_release && options_.prefetch.amount > 0 && unit.releasable_) {
    // Later gathers wait for the readers up to here, and not for what computes while the release is held back.
    compute_stream().record(unit.read_event_);
    unit.release_queued_ = true;
    releases_.push_back(&unit);
    drain_releases(static_cast<std::size_t>(options_.prefetch.amount));
    return;
  }
  release(unit);
}

void Scheduler::end_scope(FsdpModule& unit) {
  reshard(unit);
  rest(unit);
  if (!in_use(unit)) join_reads();
}

void Scheduler::drain_releases(std::size_t target) {
  while (releases_.size() > target) {
    FsdpModule& unit = *releases_.front();
    releases_.pop_front();
    release(unit);
  }
}

void Scheduler::release_all() {
  drain_releases(0);
  for (auto& unit : units_) {
    release(*unit);
    rest(*unit);
  }
}

// --- Recovery and reports ---

void Scheduler::reset() {
  for (int axis = 0; axis < mesh_.axis_count(); ++axis) {  // wakes whoever still waits for this rank
    for (Use use : {Use::gather, Use::reduce})
      mesh_.communicator(axis, use).abort(fmt::format("rank {} resets its context", mesh_.world().rank().value()));
  }
  gather_stream_.reset();
  reduce_stream_.reset();
  for (int axis = 0; axis < mesh_.axis_count(); ++axis) {
    for (Use use : {Use::gather, Use::reduce}) mesh_.communicator(axis, use).reset();
  }
  releases_.clear();
  reductions_.clear();
  unjoined_.clear();
  line_.clear();
  in_backward_.clear();
  recomputed_.clear();
  began_nested_.clear();
  backward_error_ = nullptr;
  owes_prefetch_ = nullptr;
  backward_prefetches_ = false;
  for (auto& unit : units_) {
    unit->release_queued_ = unit->borrowing_ = unit->held_ = false;
    unit->borrowers_ = 0;
  }
  for (auto& unit : units_) {
    if (unit->releasable_) drop(*unit);
    rest(*unit);
    unit->gathered_ = false;
    for (auto& group : unit->groups_) group->explain_release({});
    unit->backward_span_ = nullptr;
    unit->in_backward_ = unit->finished_ = unit->reduced_ = unit->lined_up_ = false;
    unit->forwards_left_ = 0;
    unit->window_ = FsdpModule::Window::closed;
    unit->pending_ = 0;
    unit->slot_ = -1;
    for (auto& group : unit->groups_) group->abandon_window(slot_pool_, accumulation_pool_);
  }
  accumulation_pool_.collect();
  for (auto& slot : slots_) {
    slot.in_use = false;
    slot.done = Event();
    recycle(slot);
  }
  recorded_.discard();
  forward_depth_ = 0;
  backward_active_ = awaiting_backward_ = false;
  weights_may_change_ = true;
  microbatch_ = {};
  step_ = microbatches_ = 0;  // ranks may have failed in different places
  published_epoch_ = -1;
  unsettled_reads_ = false;
  ++generation_;
}

MemoryReport Scheduler::memory_report() const {
  MemoryReport report;
  for (const auto& unit : units_) {
    for (const auto& group : unit->groups()) {
      report.main_weights += group->main_bytes();
      report.model_weights += group->model_bytes();
      report.main_gradients += group->gradient_bytes();
      report.accumulated += group->accumulated_bytes();
    }
  }
  if (arena_ != nullptr) report.arena = arena_->size() - arena_resting_;
  for (const Peers& peers : peers_) report.arena += peers.memory->places_size();
  for (const auto& [axis, inbox] : inboxes_) report.arena += inbox->size();
  report.gathered = gather_pool_.in_use();
  report.gathered_peak = gather_pool_.peak();
  report.gathered_reserved = gather_pool_.reserved();
  report.reduce_slots = slot_pool_.in_use();
  report.reduce_slots_peak = slot_pool_.peak();
  report.reduce_slots_reserved = slot_pool_.reserved();
  return report;
}

ContextCounters Scheduler::counters() const {
  ContextCounters counters = counters_;
  counters.order_mismatches = recorded_.mismatches();
  counters.arena_misses = gather_pool_.misses() + slot_pool_.misses();
  return counters;
}

void Scheduler::reset_peaks() {
  gather_pool_.reset_peak();
  slot_pool_.reset_peak();
  counters_.peak_gathered_units = gathered_units_;
  counters_.peak_reduce_slots = 0;
}

}  // namespace fsdp
