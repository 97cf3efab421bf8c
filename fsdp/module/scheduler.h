// Applies a context's policies: when weights are gathered and dropped, when gradients are reduced, on which streams.
//
// The order in which it issues collectives is a function of the model, the policies and the calls made, never of
// timing, so it is equal on all ranks. Host thread of the rank only (backward runs its hooks there too, on CPUs).
#pragma once

#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "fsdp/dbuffer/arena.h"
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
  struct OwnedParameter {
    FsdpParameterGroup* group = nullptr;
    int index = 0;
  };
  [[nodiscard]] OwnedParameter find_parameter(const std::string& name) const;  // any of its names; throws UsageError
  void materialize_buffers(const std::function<void(const std::string&, at::Tensor&)>& fill);
  void set_prefetch_list(Phase phase, const FsdpModule& unit, const std::vector<FsdpModule*>& targets);

  // Automatic mode, called by the hooks.
  void pre_forward(FsdpModule& unit);    // issues the unit's gather
  void start_forward(FsdpModule& unit);  // prefetches, waits for the weights
  // `first_node`: number of the first autograd node that the forward may have made.
  void post_forward(FsdpModule& unit, bool backward_expected, std::uint64_t first_node);
  void abandon_forward(FsdpModule& unit);  // an exception left the forward
  void pre_backward(FsdpModule& unit);
  void ensure_backward_started(FsdpModule& unit);
  // The backward of a recomputed function ended: units that began inside it are over.
  void nested_backward_ended(int depth);

  // Primitives.
  void unshard(FsdpModule& unit, std::optional<Phase> prefetch);
  void gather(FsdpModule& unit);  // no stream waits
  void declare_step(bool under_way);
  [[nodiscard]] bool current(const FsdpModule& unit) const;  // its weights, and those it borrows, are on their way
  void reshard(FsdpModule& unit);
  void end_scope(FsdpModule& unit);                              // its weights were gathered for reading
  [[nodiscard]] bool in_use(const FsdpModule& unit) const;       // by a forward, or kept for a backward to come
  [[nodiscard]] BufferPool::Source take_slot(FsdpModule& unit);  // where its memory is to come from
  void line_up(FsdpModule& unit);                                // in the order in which units' reductions are issued
  void gradient_arrived(FsdpModule& unit);                       // one of an open window
  void window_completed(FsdpModule& unit);
  void reduce(FsdpModule& unit);
  void launch_queued(FsdpModule& unit);  // a delayed reduction whose unit needs its window again
  void finish_grad_sync();
  // ContextOptions::overlap_optimizer: units whose reduction the current stream has not waited for, in its order.
  [[nodiscard]] const std::vector<FsdpModule*>& unjoined() const { return unjoined_; }
  void wait_for_gradients(FsdpModule& unit);
  void join_reductions();
  void weights_changed();
  void optimizer_stepped() {
    join_reads();
    ++updates_;
  }
  void check_idle(const char* action) const;             // throws UsageError inside a forward, backward or accumulation
  void check_no_accumulation(const char* action) const;  // the same, but after a forward alone
  void before_capture();                                 // what ranks agree on is recorded again
  void before_replay();                                  // of a captured step, with its optimizer
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
  std::uint64_t begin_range(const char* name) const { return runtime().begin_range(name); }
  void end_range(std::uint64_t range) const { runtime().end_range(range); }

 private:
  struct ReduceSlot {
    Event done;                                          // of its last reduction
    bool in_use = false;                                 // packed or being packed, reduction not yet issued
    std::int64_t last_use = 0;                           // the scheduler's count of uses
    std::vector<std::pair<c10::DataPtr, Bytes>> memory;  // of its last user, free once `done`
  };

  struct UnitPlan;
  void plan_parameters(UnitPlan& plan) const;
  void plan_parameter(UnitPlan& plan, const at::Tensor& parameter, const std::string& name, int module_index) const;
  void plan_tied(UnitPlan& plan, const at::Tensor& parameter, const std::string& name, const void* owner) const;
  void synchronize_buffers(FsdpModule& unit) const;
  [[nodiscard]] bool contains(const FsdpModule& unit, const torch::nn::Module& module) const;
  void build_tree();
  void name_units();
  void verify_parameters() const;
  void log_summary() const;
  void warn_of_poor_units() const;

  void begin_outermost_forward();
  void end_outermost_forward();
  void begin_epoch_if_needed();
  void begin_use_by_caller(const FsdpModule& unit);
  std::int64_t note_weight_versions();  // of all units; returns their sum
  [[nodiscard]] bool any_gradient_defined() const;
  void follow_requires_grad();
  void follow_compute_stream();
  void stamp_operations();  // with the microbatch they belong to
  void warn_if_nobody_steps();
  void need(FsdpModule& unit, std::optional<Phase> phase);
  void pay_prefetch();
  void prefetch_after(FsdpModule& unit, Phase phase);
  void wait_for_weights(FsdpModule& unit);  // the current stream
  [[nodiscard]] bool waited_for(const FsdpModule& unit) const;
  void issue_gather(FsdpModule& unit);  // and those of its lenders
  void gather_own(FsdpModule& unit);
  void release(FsdpModule& unit);  // unless pinned
  void drop(FsdpModule& unit);     // in any case, for its own sake and its lenders'; not while it is borrowed from
  void drop_own(FsdpModule& unit);
  void drop_finished_before(const FsdpModule& next);
  void rest(FsdpModule& unit);  // whole weights that rest but are not current become unreadable
  void release_all();
  [[nodiscard]] bool keep_after_forward(FsdpModule& unit, bool backward_expected);
  [[nodiscard]] bool has_no_backward(const FsdpModule& unit) const;
  [[nodiscard]] static bool reads_weights(const FsdpModule& unit, std::optional<Phase> phase);

  // Any node of the unit's forward, in backward; `version`: of the weights that the forward saw.
  static void before_node(FsdpModule& unit, std::uint64_t number, std::uint64_t version);
  void note_nodes(FsdpModule& unit, std::uint64_t begin) const;
  // Ends the backward of units whose nodes all have numbers of at least `number`, for those have run.
  void pass_units_made_after(std::uint64_t number, const FsdpModule& next);
  void begin_backward_of(FsdpModule& unit);
  void backward_passed(FsdpModule& unit);  // nothing of the unit is still to run
  void finish_backward_of(FsdpModule& unit);
  [[nodiscard]] bool gradients_complete(const FsdpModule& unit) const;
  void end_of_backward();
  void close_open_windows();
  [[nodiscard]] bool nested_units_reduced(const FsdpModule& unit) const;
  [[nodiscard]] bool encloses(const FsdpModule& outer, const FsdpModule& inner) const;
  void issue_reductions_in_order(bool at_end);
  [[nodiscard]] bool stays_over_microbatches(const FsdpModule& unit) const;
  [[nodiscard]] bool keep_for_next_microbatch(const FsdpModule& unit) const;
  void end_of_microbatch();
  void begin_pass(Phase phase);
  void catch_up(Phase phase, int next);
  void end_backward_span(FsdpModule& unit) const;
  void join_gathers();     // the current stream waits for all of them
  void join_after_step();  // for all communication, or all but the reductions that an optimizer will wait for
  void join_left_over();
  void end_of_step();

  void make_inboxes();      // collective
  void make_peer_memory();  // collective
  void publish_weights();   // peers may read this epoch's from here on
  void settle_reads();      // and write them again after this, on the gather stream
  void join_reads();        // the current stream too
  [[nodiscard]] bool stays_gathered(const FsdpModule& unit) const;
  void make_arena();     // collective
  void reclaim_slots();  // in the arena
  void drain_releases(std::size_t target);
  void drain_reductions(std::size_t target);
  void drain_delayed_reductions();  // those that waited for a gather of backward
  void launch_reduction(FsdpModule& unit);
  void recycle(ReduceSlot& slot);  // gives its memory back; the current stream has waited for its last reduction

  DeviceMesh mesh_;
  ContextOptions options_;
  Stream gather_stream_, reduce_stream_;                            // the same stream when unified
  std::unique_ptr<Arena> arena_;                                    // registered memory; null without
  std::vector<std::shared_ptr<CommunicatorBackend>> arena_groups_;  // that it is registered with
  Bytes arena_resting_;                                             // of it: resting weights
  struct Peers {
    std::shared_ptr<PeerMemory> memory;
    Communicator communicator;  // of the gathers that read it
  };
  std::vector<Peers> peers_;
  std::map<int, std::unique_ptr<PeerInbox>> inboxes_;  // by axis of the mesh, of reductions over it
  std::int64_t published_epoch_ = -1;
  bool unsettled_reads_ = false;
  std::string memory_path_;  // how gathers and reductions go, for the summary
  BufferPool gather_pool_;   // used on the gather stream only
  BufferPool slot_pool_;     // written by compute, guarded by the slots' events
  BufferPool accumulation_pool_;

  // Units.
  std::vector<std::shared_ptr<FsdpModule>> units_;          // [order of registration]
  std::unordered_map<const void*, OwnedParameter> owners_;  // TensorImpl -> where it is packed
  // Where owned parameters lay before: tensors over the same memory are tied to them.
  struct FormerMemory {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    std::int64_t begin = 0, end = 0;  // bytes
    const void* parameter = nullptr;  // its TensorImpl
  };
  std::vector<FormerMemory> former_memory_;
  std::unordered_map<const torch::nn::Module*, int> unit_of_module_;
  std::unordered_map<std::string, const void*> parameter_names_;  // every path from a root -> TensorImpl
  UnitTree tree_;
  std::vector<int> parent_;  // [unit], -1 for roots
  std::vector<int> forward_order_, backward_order_;
  int first_trainable_ = 0;                 // position in forward_order_ of the first unit that trains
  int first_owner_ = -1, last_owner_ = -1;  // of forward_order, among units that own weights
  PrefetchTable prefetch_table_;
  RecordedOrder recorded_;
  std::vector<std::pair<std::pair<Phase, int>, std::vector<int>>> pending_lists_;  // set before finalization
  bool finalized_ = false;

  // Step.
  MicrobatchOptions microbatch_;
  std::int64_t epoch_ = 0;          // grows whenever weights may have changed since
  bool step_declared_ = false;      // by a caller that drives units: weights do not change in it
  bool step_has_begun_ = false;     // and its first gather was issued
  bool weights_may_change_ = true;  // outside of a step: between its last and the next first microbatch
  bool awaiting_backward_ = false;  // a forward of this epoch will have one
  bool gradients_at_epoch_start_ = false;
  std::int64_t leaf_versions_ = 0;  // when the epoch started
  std::int32_t updates_ = 0;        // steps of the library's own optimizers
  int forward_depth_ = 0;
  bool backward_prefetches_ = false;                // this backward has come to its first prefetch
  FsdpModule* owes_prefetch_ = nullptr;             // the first unit of this backward, with late_first_prefetch
  const StreamBackend* compute_backend_ = nullptr;  // of the stream on which accumulators run
  bool backward_active_ = false;
  int graph_task_ = -1;
  bool selective_backward_ = false;    // for chosen inputs only (autograd::grad): no parameter receives a gradient
  std::exception_ptr backward_error_;  // thrown where autograd could not carry it
  FsdpModule* watched_before_backward_ = nullptr;
  bool backward_expected_ = false;  // some output of this forward requires a gradient
  std::vector<FsdpModule*> line_;   // units whose backward began and whose reduction is not issued yet, oldest first
  std::vector<FsdpModule*> in_backward_;  // units whose backward began and is not over
  std::int64_t generation_ = 0;           // backwards that ended
  std::vector<FsdpModule*> recomputed_;   // gathered by a recomputation, still to be dropped or to go backward
  std::vector<std::pair<FsdpModule*, int>> began_nested_;  // backwards begun inside a recomputed one, with its depth
  // SkippedUnits::participate, [phase]: positions of the static order that are behind, and that were gathered.
  int passed_[2] = {0, 0}, gathered_up_to_[2] = {0, 0};
  std::vector<int> position_[2];   // [phase][unit] in the static order
  std::int32_t step_ = 0;          // last microbatches whose backward ended
  std::int32_t microbatches_ = 0;  // whose backward ended since
  std::int64_t idle_steps_ = 0;    // in which gradients were reduced, but neither freed nor used
  std::vector<double> samples_;    // of the leaves, when the first of them began
  std::deque<ReduceSlot> slots_;   // two that take turns, then those of units with nested units
  std::size_t next_slot_ = 0;
  std::int64_t slot_uses_ = 0;
  std::deque<FsdpModule*> releases_;    // delayed release
  std::deque<FsdpModule*> reductions_;  // delayed reduction
  std::vector<FsdpModule*> unjoined_;
  std::int64_t unjoined_versions_ = 0;  // of the leaves, when their backward ended
  Bytes gathered_bytes_, kept_bytes_;
  int gathered_units_ = 0;
  ContextCounters counters_;
};

}  // namespace fsdp
