// Applies a context's policies: when weights are gathered and dropped, when gradients are reduced, on which streams.
//
// The order in which it issues collectives is a function of the model, the policies and the calls made, never of
// timing, so it is equal on all ranks. Host thread of the rank only (backward runs its hooks there too, on CPUs).
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "fsdp/dbuffer/buffer_pool.h"
#include "fsdp/mesh/device_mesh.h"
#include "fsdp/module/context.h"
#include "fsdp/module/fsdp_module.h"
#include "fsdp/module/options.h"
#include "fsdp/module/prefetch_plan.h"
#include "fsdp/module/unit_order.h"

namespace fsdp {

class Scheduler {
 public:
  Scheduler(DeviceMesh mesh, ContextOptions options);
  ~Scheduler();

  // Construction.
  FsdpModule& add_unit(std::vector<std::shared_ptr<torch::nn::Module>> modules, const UnitOptions& options);
  void finalize();
  [[nodiscard]] bool finalized() const { return finalized_; }
  void set_prefetch_list(Phase phase, const FsdpModule& unit, const std::vector<FsdpModule*>& targets);

  // Automatic mode, called by the hooks.
  void pre_forward(FsdpModule& unit);    // issues the unit's gather
  void start_forward(FsdpModule& unit);  // prefetches, waits for the weights
  void post_forward(FsdpModule& unit, bool backward_expected);
  void abandon_forward(FsdpModule& unit);  // an exception left the forward
  void pre_backward(FsdpModule& unit);
  void ensure_backward_started(FsdpModule& unit);

  // Primitives.
  void unshard(FsdpModule& unit, std::optional<Phase> prefetch);
  void reshard(FsdpModule& unit);
  [[nodiscard]] bool in_use(const FsdpModule& unit) const;  // by a forward, or kept for a backward to come
  void take_slot(FsdpModule& unit);
  void window_completed(FsdpModule& unit);
  void reduce(FsdpModule& unit);
  void launch_queued(FsdpModule& unit);  // a delayed reduction whose unit needs its window again
  void finish_grad_sync();
  void weights_changed() { ++foreign_writes_; }
  void check_gradients_reduced(const char* action) const;  // throws UsageError naming the unit
  void drop_accumulated();
  void reset();

  // State that units read.
  [[nodiscard]] const ContextOptions& options() const { return options_; }
  [[nodiscard]] const DeviceMesh& mesh() const { return mesh_; }
  [[nodiscard]] Runtime& runtime() const { return *mesh_.runtime(); }
  [[nodiscard]] Stream compute_stream() const { return mesh_.runtime()->compute_stream(); }
  [[nodiscard]] const Stream& gather_stream() const { return gather_stream_; }
  [[nodiscard]] MicrobatchOptions& microbatch() { return microbatch_; }
  [[nodiscard]] ReducePolicy reduce_policy() const { return microbatch_.reduce.value_or(options_.reduce); }
  [[nodiscard]] BufferPool& slot_pool() { return slot_pool_; }
  [[nodiscard]] BufferPool& accumulation_pool() { return accumulation_pool_; }
  [[nodiscard]] const std::vector<std::shared_ptr<FsdpModule>>& units() const { return units_; }
  [[nodiscard]] const std::vector<int>& forward_order() const { return forward_order_; }
  [[nodiscard]] const std::vector<int>& backward_order() const { return backward_order_; }
  [[nodiscard]] MemoryReport memory_report() const;
  [[nodiscard]] ContextCounters counters() const;
  void reset_peaks();

  // A span of the unit's own operations, when recording; null otherwise.
  [[nodiscard]] trace::Span* issue_span(const char* name, trace::Kind kind, const Stream& stream) const;
  [[nodiscard]] trace::Span* issue_compute_span(const char* name) const;

 private:
  struct ReduceSlot {
    Event done;                                          // of its last reduction
    bool in_use = false;                                 // packed or being packed, reduction not yet issued
    std::vector<std::pair<c10::DataPtr, Bytes>> memory;  // of its last user, free once `done`
  };

  void build_tree();
  void name_units();
  void log_summary() const;

  void begin_outermost_forward();
  void end_outermost_forward();
  void begin_epoch_if_needed();
  [[nodiscard]] std::int64_t leaf_versions() const;
  [[nodiscard]] bool any_gradient_defined() const;
  void need(FsdpModule& unit, std::optional<Phase> phase);
  void prefetch_after(FsdpModule& unit, Phase phase);
  void issue_gather(FsdpModule& unit);
  void release(FsdpModule& unit);  // unless pinned
  void drop(FsdpModule& unit);     // in any case
  void release_all();
  [[nodiscard]] bool keep_after_forward(FsdpModule& unit, bool backward_expected);

  void end_of_backward();
  void close_open_windows();
  void end_backward_span(FsdpModule& unit) const;
  void join();  // the current stream waits for all communication
  void end_of_step();

  void drain_releases(std::size_t target);
  void drain_reductions(std::size_t target);
  void launch_reduction(FsdpModule& unit);
  void recycle(ReduceSlot& slot);  // gives its memory back; the current stream has waited for its last reduction

  DeviceMesh mesh_;
  ContextOptions options_;
  Stream gather_stream_, reduce_stream_;  // the same stream when unified
  BufferPool gather_pool_;                // used on the gather stream only
  BufferPool slot_pool_;                  // written by compute, guarded by the slots' events
  BufferPool accumulation_pool_;

  // Units.
  std::vector<std::shared_ptr<FsdpModule>> units_;           // [order of registration]
  std::unordered_map<const void*, int> owner_of_parameter_;  // TensorImpl -> unit
  std::unordered_map<const torch::nn::Module*, int> unit_of_module_;
  UnitTree tree_;
  std::vector<int> parent_;  // [unit], -1 for roots
  std::vector<int> forward_order_, backward_order_;
  int first_owner_ = -1, last_owner_ = -1;  // of forward_order, among units that own weights
  PrefetchTable prefetch_table_;
  RecordedOrder recorded_;
  std::vector<std::pair<std::pair<Phase, int>, std::vector<int>>> pending_lists_;  // set before finalization
  bool finalized_ = false;

  // Step.
  MicrobatchOptions microbatch_;
  std::int64_t epoch_ = 0;          // grows whenever weights may have changed since
  bool weights_may_change_ = true;  // outside of a step: between its last and the next first microbatch
  bool awaiting_backward_ = false;  // a forward of this epoch will have one
  bool gradients_at_epoch_start_ = false;
  std::int64_t leaf_versions_ = 0;   // when the epoch started
  std::int64_t foreign_writes_ = 0;  // announced by whoever writes leaves without moving their versions
  int forward_depth_ = 0;
  bool backward_active_ = false;
  int graph_task_ = -1;
  bool backward_expected_ = false;  // some output of this forward requires a gradient
  std::deque<ReduceSlot> slots_;    // two that take turns, then those of units with nested units
  std::size_t next_slot_ = 0;
  std::deque<FsdpModule*> releases_;    // delayed release
  std::deque<FsdpModule*> reductions_;  // delayed reduction
  Bytes gathered_bytes_, kept_bytes_;
  int gathered_units_ = 0;
  ContextCounters counters_;
};

}  // namespace fsdp
