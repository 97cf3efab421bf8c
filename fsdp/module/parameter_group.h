// Parameters of one unit with equal dtypes and placements, trainable ones apart from frozen ones as they were built:
// their buffers and what moves between them.
//
//   main weight     optimizer placement, main dtype     what the optimizer updates; the leaves are views of it
//   model weight    parameter placement, compute dtype  what gathers read; shares memory with main when dtypes agree
//   whole weight    replicated, compute dtype           what the module's parameters are views of; comes and goes, and
//                                                       is readable only while it is current
//   slot            all gradients, reduce dtype         packed local gradients; reduced in place
//   accumulated     gradient placement, gradient dtype  between microbatches, where a reduction is put off
//   main gradient   optimizer placement, gradient dtype the leaves' `.grad`; exists from first use until zero_grad
//
// Nothing here is per parameter on the way of a gather or a reduction. Host thread of the rank only.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/comm/peer_inbox.h"
#include "fsdp/comm/peer_memory.h"
#include "fsdp/dbuffer/buffer_pool.h"
#include "fsdp/dbuffer/dbuffer.h"
#include "fsdp/module/options.h"

namespace fsdp {

class FsdpModule;
class GradAccumulator;
class GradientPacking;

struct ParameterInfo {
  std::string name;                 // path from the unit's module until names are set, then from the root
  int module_index = 0;             // which of the unit's modules
  at::Tensor parameter;             // the module's own tensor, for life
  std::vector<at::Tensor> aliases;  // further tensors over the same values (tied weights that are not one tensor)
  at::Tensor leaf;                  // this rank's share of the main weight
  std::vector<std::int64_t> sizes, strides;
};

class FsdpParameterGroup {
 public:
  struct Dtypes {
    c10::ScalarType compute, reduce, main, gradient;
    bool operator==(const Dtypes&) const = default;
  };

  // Takes over the parameters: packs their values into shards and makes them views of released storage. `synchronize`:
  // all ranks take rank 0's values. Parameters on the meta device wait for `materialize`.
  FsdpParameterGroup(FsdpModule& unit, std::shared_ptr<const SubMesh> mesh, Strategy strategy,
                     std::vector<ParameterInfo> parameters, const Dtypes& dtypes, bool synchronize);
  ~FsdpParameterGroup();

  [[nodiscard]] const std::vector<ParameterInfo>& parameters() const { return parameters_; }
  [[nodiscard]] std::vector<ParameterInfo>& parameters() { return parameters_; }
  // Whether any parameter requires a gradient, and how many gradients a backward that uses them all delivers: as of the
  // last `follow_requires_grad`.
  [[nodiscard]] bool trainable() const { return expected_arrivals_ > 0; }
  [[nodiscard]] int expected_arrivals() const { return expected_arrivals_; }
  // Takes over what the user froze or unfroze; the leaves follow their parameters. Called before a forward.
  void follow_requires_grad();
  [[nodiscard]] Kernels* kernels() const { return runtime().kernels(); }  // of the device; null on the CPU
  [[nodiscard]] const Dtypes& dtypes() const { return dtypes_; }
  [[nodiscard]] const SubMesh& mesh() const { return *mesh_; }
  [[nodiscard]] const GlobalLayout& layout() const { return *layout_; }
  [[nodiscard]] const PlacementList& optimizer_placements() const;
  [[nodiscard]] const DBuffer& main_weight() const { return main_weight_; }
  // Grows with every in-place write to a leaf, and with `note_write` by whoever writes without moving their versions.
  [[nodiscard]] std::int64_t weight_version() const;
  void note_write() { ++noted_writes_; }
  [[nodiscard]] bool on_meta() const { return on_meta_; }
  [[nodiscard]] const Strategy& strategy() const { return strategy_; }
  // Throws UsageError when a forward would use the wrong weights: no values yet, or tensors replaced.
  void check_usable() const;
  [[nodiscard]] FsdpModule& unit() const { return unit_; }

  // Weights. Both enqueue on `stream`; the whole weight's memory comes from `pool`, used on that stream only.
  void refresh(std::int64_t epoch, const Stream& stream,
               const char* label);  // model weight from main weight, once an epoch
  void gather_whole(BufferPool& pool, const Stream& stream, const char* label);
  void release_whole(BufferPool& pool);
  // What reads of the released weights throw from here on, after an error; empty: as usual again.
  void explain_release(const std::string& reason);
  [[nodiscard]] bool releasable() const { return releasable_; }  // false: whole weights rest here
  // Whole weights that rest here and are current only from a refresh to the next optimizer step.
  [[nodiscard]] bool gets_stale() const { return !releasable_ && refresh_needed_; }
  [[nodiscard]] Bytes whole_bytes() const { return whole_.size(); }

  // Gradients. A window collects the local gradients of one backward and is closed before it is reduced. Returns
  // whether the window needs slot memory (attach_slot) to write to.
  bool open_window(bool is_last, ReducePolicy policy, BufferPool& accumulations);
  void attach_slot(BufferPool& slots, BufferPool::Source source);
  // Stores one gradient, adding to what came before; an undefined one only arrives. Returns whether it was expected:
  // a parameter used in several graphs of one backward delivers more often.
  bool receive(int index, const at::Tensor& gradient);
  // Where a producer may write the gradient of parameter `index` itself; undefined when it must hand it over instead
  // (already written in this window, or a dtype it cannot write). Counts as written once asked for. Without
  // `wide_products` (products of low precision with an fp32 result) the place has the compute dtype and is not added
  // to.
  struct GradientPlace {
    at::Tensor tensor;
    bool add = false;  // to what is there
  };
  [[nodiscard]] GradientPlace claim_gradient(int index, bool wide_products);
  // Marks what was used, fills in what never came. May be repeated after late gradients.
  void close_window();
  // Memory that the reduction will end in, before the event after which it may start.
  void prepare_reduction();
  // Enqueues the reduction of a closed window on `stream`. Ends in the leaves' `.grad` or in `accumulated`.
  void reduce(const Stream& stream, BufferPool& slots, BufferPool& accumulations, const char* label);
  // The slot's memory, once its reduction was enqueued; empty when the window used none.
  [[nodiscard]] c10::DataPtr take_slot_memory() {
    return slot_.storage().attached() ? slot_.storage().detach() : c10::DataPtr();
  }
  [[nodiscard]] bool has_accumulated() const { return has_accumulated_; }
  void drop_accumulated(BufferPool& accumulations);
  [[nodiscard]] bool any_gradient_defined() const;  // of the leaves
  // Whether this rank used every parameter in the windows of this step.
  [[nodiscard]] bool used_all() const;
  // Leaves whose parameter no rank used lose their `.grad`. The current stream has waited for the reductions. On a
  // device it reads something only where this rank did not use a parameter, and then waits; while a step is captured it
  // does nothing. Returns whether it waited.
  bool drop_unused_gradients();
  // Part of the main gradient, padding included; undefined while there is none. The leaves' `.grad` are read, so a
  // tensor that the user put in their place counts.
  [[nodiscard]] at::Tensor gradient_slice(ElementRange packed);
  // The gradients that exist, as few tensors as possible: the whole shard when all do.
  [[nodiscard]] std::vector<at::Tensor> defined_gradients();
  // Frees gradient memory that no leaf refers to any more.
  void drop_gradient_memory();
  void zero_gradients(bool set_to_none);
  void abandon_window(BufferPool& slots, BufferPool& accumulations);  // after an error

  // Where an optimizer may write the low-precision copy of the main weight's range itself, so that the next refresh has
  // nothing to do: an address of dtype `dtypes().compute`, or null. It notes when it has written all of it; that holds
  // for one refresh, since versions do not see every write.
  [[nodiscard]] void* low_precision_copy(ElementRange packed) const;
  void note_low_precision_copy() { copied_version_ = weight_version(); }
  // Autograd runs accumulators on the stream that was current when they were made: make them anew for another one.
  void follow_compute_stream();

  // A further tensor over the values of a parameter: it becomes a view of the whole weight, its gradients are added.
  void add_alias(int index, const at::Tensor& tensor);

  // The resting weights that gathers send move to memory at `part` of a registered arena; null: back to
  // memory of their own.
  void move_model_weight(void* part);

  // Smaller shares would be padded too much. FSDP_READ_PEERS_FROM_MIB, default 8.
  [[nodiscard]] static Bytes least_peer_share();
  // Gathers read the peers' shares: this group is part `part` of `peers`, or no longer any (null).
  void use_peers(PeerMemory* peers, int part);
  [[nodiscard]] bool reads_peers() const { return peers_ != nullptr; }

  // Reductions over axis i of the group's mesh go through inboxes[i] where that is not null.
  void use_inboxes(std::vector<PeerInbox*> inboxes) { inboxes_ = std::move(inboxes); }

  // Turns names into paths from the root; `prefixes` are those of the unit's modules, with their separator.
  void set_names(const std::vector<std::string>& prefixes);
  // Values from a function of (name, whole tensor), for parameters built on the meta device.
  void materialize(const std::function<void(const std::string&, at::Tensor&)>& fill);
  // Whole tensor of one parameter from the shards of `source`: main weights, or gradients. Collective, blocks the host.
  [[nodiscard]] at::Tensor full_tensor(int index, bool gradient, const Stream& stream);

  // Bytes by class.
  [[nodiscard]] Bytes main_bytes() const { return main_weight_.size(); }
  [[nodiscard]] Bytes model_bytes() const;
  [[nodiscard]] Bytes gradient_bytes() const;
  [[nodiscard]] Bytes accumulated_bytes() const;
  [[nodiscard]] Bytes resting_bytes() const { return model_weight_.size(); }  // what gathers send
  [[nodiscard]] Bytes slot_bytes() const { return slot_.size(); }

 private:
  // The main gradient: its views are the leaves' `.grad`.
  struct MainGradient {
    std::unique_ptr<DBuffer> buffer;
    std::vector<at::Tensor> views;  // [parameter]
  };

  void pack_values(bool synchronize);
  void check_ranks_agree() const;
  void store_shards(const DBuffer& whole_main);
  void install_views();
  void make_leaves();
  void find_marks();
  void install_accumulators();
  void install_accumulator(int index, const at::Tensor& parameter);
  [[nodiscard]] bool deferred() const { return accumulated_placements_ != reduced_placements_; }
  void ensure_accumulated(BufferPool& accumulations);
  void free_accumulated(BufferPool& accumulations);
  [[nodiscard]] DBuffer& destination() { return direct_ ? *accumulated_ : slot_; }
  [[nodiscard]] at::Tensor& destination_view(int index) {
    return direct_ ? accumulated_views_[index] : slot_views_[index];
  }
  [[nodiscard]] Runtime& runtime() const { return *mesh_->mesh().runtime(); }
  // `stream` may use memory that was just allocated for, or written by, the stream that computes.
  void order_after_compute(const Stream& stream) const;
  void clear_padding(const DBuffer& buffer);
  void close_window_on_device(const DBuffer& buffer);
  // Both return whether they gave the stream that computes something to do.
  bool ensure_main_gradient(bool fresh, bool set_to_zero);
  bool adopt_gradients();
  bool prepare_main_gradient(const Stream& stream);  // `stream` will write it; returns whether it overwrites
  [[nodiscard]] bool gradient_views_unshared() const;
  // Sums what has the placements between microbatches over the axes that are left, and adds it to the main gradient.
  void reduce_to_main_gradient(const DBuffer& sums, const Stream& stream, const char* label);
  void enqueue_accumulate(const DBuffer& to, const DBuffer& from, ElementRange range, double divisor, bool overwrite,
                          const Stream& stream) const;

  FsdpModule& unit_;
  std::shared_ptr<const SubMesh> mesh_;
  const Strategy strategy_;
  std::vector<ParameterInfo> parameters_;  // [parameter]
  const Dtypes dtypes_;
  int expected_arrivals_ = 0;
  bool on_meta_ = false;
  bool releasable_ = false;
  bool refresh_needed_ = false;  // main and model weight are not the same memory
  double divisor_ = 1;
  std::int64_t epoch_ = -1;           // of the model weight
  std::int64_t copied_version_ = -1;  // of the main weight that the model weight is a copy of
  std::int64_t noted_writes_ = 0;
  std::string released_message_;
  PlacementList replicated_;
  // Of gradients before any reduction, between microbatches, and in the end. Replicate on an axis of one rank, where
  // there is nothing to sum or to put off.
  PlacementList partial_, gradient_placements_, reduced_placements_;
  std::shared_ptr<const GlobalLayout> layout_;

  DBuffer model_weight_, main_weight_, whole_, slot_;
  PeerMemory* peers_ = nullptr;
  int peer_part_ = 0;
  std::vector<PeerInbox*> inboxes_;        // [axis of the group's mesh], or empty
  std::vector<at::Tensor> slot_views_;     // [parameter]
  std::vector<std::int64_t> marks_;        // packed coordinates: first element of every piece of every parameter
  std::vector<int> marks_begin_;           // [parameter] -> index into marks_, one more at the end
  std::vector<std::int64_t> local_marks_;  // those inside this rank's share of the main gradient
  std::vector<ElementRange> padding_;      // packed coordinates that belong to no parameter
  MainGradient main_gradient_;

  // Window.
  bool is_last_ = true;
  bool direct_ = false;                        // gradients go to `accumulated`, which holds all of them
  std::unique_ptr<DBuffer> accumulated_;       // without memory while nothing is put off
  std::vector<at::Tensor> accumulated_views_;  // [parameter], when it holds all of them
  PlacementList accumulated_placements_;
  bool has_accumulated_ = false;
  std::vector<std::uint8_t> arrived_, written_;                 // [parameter]; arrived_ counts
  std::vector<std::uint8_t> used_;                              // [parameter] by this rank, in any window of the step
  std::unique_ptr<GradientPacking> packing_;                    // on a device
  std::vector<std::shared_ptr<GradAccumulator>> accumulators_;  // of parameters and aliases
};

}  // namespace fsdp
