// The public face of sharded training: what the units of one or several roots share.
//
//   auto context = fsdp::FsdpContext::create(mesh, {.prefetch = fsdp::Prefetch::depth(1)});
//   for (auto& block : *model->blocks) context->fully_shard(block, unit);   // children first
//   context->fully_shard(model, unit);                                      // then parents
//   torch::optim::AdamW optimizer(context->parameters());
//
// All ranks make the same calls in the same order. One host thread per rank uses a context; it outlives every graph
// made under it. Modules keep their own parameter tensors for life (full shape, released storage while sharded); the
// sharded leaves for optimizers are `parameters()`.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/mesh/device_mesh.h"
#include "fsdp/module/fsdp_module.h"
#include "fsdp/module/memory_report.h"
#include "fsdp/module/module_ref.h"
#include "fsdp/module/options.h"

namespace fsdp {

class Scheduler;

// Fills one whole parameter. The generator is seeded from the name, so values are equal for every number of ranks.
using InitFunction = std::function<void(const std::string& name, at::Tensor& whole, at::Generator& generator)>;

struct MaterializeOptions {
  std::uint64_t seed = 0;
};

// Counters since the context was made.
struct ContextCounters {
  std::int64_t unshards = 0;           // units gathered or refreshed
  std::int64_t prefetched = 0;         // of them, before they were needed
  std::int64_t reductions = 0;         // units reduced
  std::int64_t order_mismatches = 0;   // of Prefetch::recorded
  std::int64_t one_sided_gathers = 0;  // of `unshards`: some of the unit's weights were read from the peers' memory
  std::int64_t arena_misses = 0;       // buffers that found no room in the arena and came from the allocator
  std::int64_t waits_for_device = 0;   // by the host, to learn whether parameters that this rank did not use were used
  int peak_gathered_units = 0;
  int peak_reduce_slots = 0;  // at most 2
};

class FsdpContext : public std::enable_shared_from_this<FsdpContext> {
 public:
  static std::shared_ptr<FsdpContext> create(DeviceMesh mesh, ContextOptions options = {});
  ~FsdpContext();  // waits for this rank's work in flight, frees everything; never communicates
  FsdpContext(const FsdpContext&) = delete;
  FsdpContext& operator=(const FsdpContext&) = delete;

  // Makes one unit of a module, or of several that are used one after the other: its parameters that no nested unit
  // owns are sharded, gathered and reduced together. Values of parameters and buffers become rank 0's. A weight that an
  // earlier unit owns (tied) stays there; that unit is gathered whenever this one is. Modules need hooks (FSDP_MODULE,
  // Hooked) unless `options.register_hooks` is false. Throws UsageError before anything is changed.
  FsdpModule& fully_shard(const ModuleRef& module, const UnitOptions& options = {});
  FsdpModule& fully_shard(const std::vector<ModuleRef>& modules, const UnitOptions& options = {});

  // Ends construction: names, roots, orders; logs one summary line. The first forward does it otherwise.
  void finalize();

  // Gives parameters and buffers built on the meta device their values, one whole unit in memory at a time; buffers
  // then take rank 0's. Finalizes.
  void materialize(const InitFunction& init, const MaterializeOptions& options = {});

  // The sharded leaves: one per parameter, in order of registration; 1-D, this rank's elements only (maybe none), in
  // the main dtype. Their `.grad` is this rank's share of the reduced gradient.
  [[nodiscard]] std::vector<at::Tensor> parameters() const;
  [[nodiscard]] std::vector<std::pair<std::string, at::Tensor>> named_parameters() const;

  // The whole value (or gradient, zeros where undefined) of one parameter, gathered from all ranks in the dtype of the
  // leaf (or its gradient). A tied weight is found under each of its names. All ranks call it. Blocks the host.
  [[nodiscard]] at::Tensor full_parameter(const std::string& name);
  [[nodiscard]] at::Tensor full_gradient(const std::string& name);

  // Declares what the backwards until the scope's end are. Scopes nest; leaving restores what was before.
  class [[nodiscard]] MicrobatchScope {
   public:
    MicrobatchScope(Scheduler& scheduler, const MicrobatchOptions& options);
    ~MicrobatchScope();
    MicrobatchScope(const MicrobatchScope&) = delete;
    MicrobatchScope& operator=(const MicrobatchScope&) = delete;

   private:
    Scheduler& scheduler_;
    MicrobatchOptions previous_;
  };
  MicrobatchScope microbatch(const MicrobatchOptions& options);
  MicrobatchScope no_sync() { return microbatch({.is_last = false}); }

  // Caller-driven mode: weights do not change while it lives, so only its first gather waits for what the current
  // stream was given before.
  class [[nodiscard]] StepScope {
   public:
    explicit StepScope(Scheduler& scheduler);
    ~StepScope();
    StepScope(const StepScope&) = delete;
    StepScope& operator=(const StepScope&) = delete;

   private:
    Scheduler& scheduler_;
  };
  StepScope step_scope() { return StepScope(*scheduler_); }
  [[nodiscard]] const MicrobatchOptions& current_microbatch() const;

  // Caller-driven mode: orders the current stream after every reduction of the step, once, before clip and optimizer.
  // Throws UsageError naming a unit with half its gradients, or with gradients that nobody reduced.
  void finish_grad_sync();

  // Records one whole step as a CUDA graph: forwards, backwards, collectives, clipping and optimizer, as `step`
  // enqueues them. Nothing of it runs. `replay()` runs it, with the same results bit for bit as calling `step`, at the
  // host time of one launch; the tensor is what `step` returned (its loss, say) and has the values of the last replay.
  //
  // Run the step some times before, with the same shapes. Data comes in by copying it into tensors that `step` reads.
  // The learning rate is read anew, which parameters are used is not. Throws UsageError with the reason when something
  // in the step cannot be recorded; training can then go on uncaptured. All ranks capture, and replay, together.
  class CapturedStep {
   public:
    at::Tensor replay();

   private:
    friend class FsdpContext;
    std::shared_ptr<FsdpContext> context_;
    std::unique_ptr<DeviceGraph> graph_;
    at::Tensor result_;
  };
  [[nodiscard]] CapturedStep capture(const std::function<at::Tensor()>& step);

  // Says that leaves were written in a way that moves no version counter (through .data(), or by a kernel of one's own)
  // while no backward was between: the next forward then gathers anew. Optimizer steps and in-place writes need no
  // call.
  void weights_changed();
  void optimizer_stepped();  // the same, by an optimizer on every rank, before it writes

  // After an exception, with all ranks alive: back to a clean sharded state; gradients of the step are dropped. All
  // ranks call it. Blocks the host.
  void reset();

  // Weights of a unit gathered for reading while the scope lives, as they were when it began. Not over a write to them:
  // where gathers read the peers' memory, this rank's share is seen as it is.
  class [[nodiscard]] UnshardScope {
   public:
    explicit UnshardScope(FsdpModule& unit);
    ~UnshardScope();
    UnshardScope(const UnshardScope&) = delete;
    UnshardScope& operator=(const UnshardScope&) = delete;

   private:
    FsdpModule& unit_;
  };
  UnshardScope unshard_scope(FsdpModule& unit) { return UnshardScope(unit); }

  [[nodiscard]] const std::vector<std::shared_ptr<FsdpModule>>& units() const;  // [order of registration]
  [[nodiscard]] FsdpModule& unit(const std::string& name) const;                // throws UsageError listing the names
  [[nodiscard]] std::vector<std::string> forward_order() const;
  [[nodiscard]] std::vector<std::string> backward_order() const;
  [[nodiscard]] const DeviceMesh& mesh() const;
  [[nodiscard]] const ContextOptions& options() const;
  [[nodiscard]] MemoryReport memory_report() const;
  [[nodiscard]] ContextCounters counters() const;
  void reset_peaks();

  // With ContextOptions::overlap_optimizer: orders the current stream after the reductions of the last backward; those
  // of all units, or of one. Units still reduced are listed in the order in which they will be done. (The library's
  // optimizers, clip_grad_norm_ and full_gradient do this themselves.)
  void wait_for_gradients();
  void wait_for_gradients(FsdpModule& unit);
  [[nodiscard]] std::vector<FsdpModule*> units_being_reduced() const;

  // Throws UsageError inside a forward or backward, and between the microbatches of a step.
  void check_between_steps(const char* action) const;
  // For optimizers and clipping: throws UsageError when microbatches were accumulated and never reduced.
  void check_gradients_reduced(const char* action) const;
  void drop_accumulated_gradients();

  // Per-group access for optimizers; see module/parameter_group.h.
  [[nodiscard]] std::vector<FsdpParameterGroup*> groups() const;

 private:
  explicit FsdpContext(std::unique_ptr<Scheduler> scheduler);
  std::unique_ptr<Scheduler> scheduler_;
};

}  // namespace fsdp
