// What a user chooses for a unit and for a context.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/base/types.h"
#include "fsdp/layout/placement.h"
#include "fsdp/trace/recorder.h"

namespace fsdp {

// Dtypes of one unit. Unset entries follow the parameter as it was built.
struct MixedPrecisionPolicy {
  std::optional<c10::ScalarType> param_dtype = {};       // gathered weights and compute; default: as built
  std::optional<c10::ScalarType> reduce_dtype = {};      // gradients on the wire; default: param_dtype
  std::optional<c10::ScalarType> main_param_dtype = {};  // sharded leaves; default: as built
  std::optional<c10::ScalarType> main_grad_dtype = {};   // accumulated gradients, the leaves' .grad; default: as leaves
  std::optional<c10::ScalarType> output_dtype = {};      // floating-point results of forward; default: as computed
  std::optional<c10::ScalarType> buffer_dtype = {};      // floating-point buffers; default: as built
  bool cast_forward_inputs = true;  // floating-point tensors in forward's arguments, to param_dtype
  // Parameters for which this is true keep the dtype they were built with, in compute and on the wire (a router or norm
  // in fp32, say). `name` is the path from the unit's module.
  std::function<bool(const std::string& name, const at::Tensor& parameter)> keep_dtype = {};
};

// What happens to a unit's gathered weights after its forward, when a backward will follow. Without one they are always
// dropped, and after backward too.
enum class Reshard : std::uint8_t {
  automatic,      // drop, except for roots, whose backward starts as their forward ends
  after_forward,  // drop
  never,          // keep until backward; a unit without trainable parameters, in a root that trains, until the step's
                  // last microbatch
  by_budget,      // keep while ContextOptions::keep_budget allows
};

struct UnitOptions {
  Strategy placements = zero3("dp");
  MixedPrecisionPolicy mixed_precision = {};
  // The one divisor of a gradient's whole sum. Default: the number of ranks over whose data the sum runs (the product
  // of the strategy's axes). 1 switches averaging off.
  std::optional<double> gradient_divisor = {};
  // Further mesh axes whose ranks hold other parameters under the same names (the experts of expert parallelism): norms
  // of gradients add up over them.
  std::vector<std::string> partitioned_axes = {};
  Reshard reshard = Reshard::automatic;
  // Whether the unit's backward reads its weights. false: it is not gathered for it, and what reads them all the same
  // throws. Default: true, except for units of nothing but torch::nn::Embedding. Under SkippedUnits::participate
  // always.
  std::optional<bool> backward_reads_weights = {};
  // Parameters of at most so many elements stay whole on every rank; their gradients are summed by an all-reduce. Saves
  // nothing but launches: for units of tiny parameters only.
  std::int64_t replicate_up_to = 0;
  // false: caller-driven. No forward or backward hooks; the caller unshards, reshards and reduces (FsdpModule).
  bool register_hooks = true;
};

// Which units are gathered before they are needed. The next gather is issued before the current unit computes and
// before its weights are released.
struct Prefetch {
  enum class Kind : std::uint8_t { none, depth, lists, recorded, delayed_release };
  Kind kind = Kind::depth;
  int amount = 1;                    // depth and recorded: units ahead; delayed_release: releases held back
  std::optional<Bytes> budget = {};  // gathered bytes beyond which nothing is prefetched

  static Prefetch none() { return {Kind::none, 0}; }
  static Prefetch depth(int units) { return {Kind::depth, units}; }  // along the static orders
  static Prefetch lists() { return {Kind::lists, 0}; }               // FsdpModule::set_forward_prefetch and _backward_
  static Prefetch recorded(int units = 1) {
    return {Kind::recorded, units};
  }  // along the last iteration from the same root
  // No order needed: a release waits until so many later gathers were issued (the host must run ahead of the device).
  static Prefetch delayed_release(int target_length = 1) { return {Kind::delayed_release, target_length}; }

  // Units gathered at the same time, beside those that stay.
  [[nodiscard]] int units_at_once() const { return kind == Kind::none ? 1 : kind == Kind::lists ? 2 : amount + 1; }
};

// When a unit's reduction is issued after its gradients are packed.
struct Reduction {
  int delay = 0;  // packed units held back, issued after the next gather of backward and at its end
  static Reduction immediate() { return {0}; }
  static Reduction delayed(int target_length = 1) { return {target_length}; }
};

// What happens to gradients when more microbatches follow.
enum class ReducePolicy : std::uint8_t {
  every_microbatch,  // reduce into the strategy's gradient placement each time; lean memory
  last_microbatch,   // accumulate whole gradients, reduce once; what a DDP user expects of no_sync
};

// How gradients are reduced between GPUs of one host.
enum class Reducer : std::uint8_t {
  kernel,       // NCCL's symmetric kernel, in place in registered memory
  copy_engine,  // shares are copied to their owners, who add them up in rank order, in fp32, rounded once, and to the
                // main gradient in the same pass (comm/peer_inbox.h). No multiprocessor is held while data moves or a
                // peer is late; takes one more unit of memory less this rank's share, for each axis
};

enum class SkippedUnits : std::uint8_t { error, participate };

struct ContextOptions {
  Prefetch prefetch = Prefetch::depth(1);
  Reduction reduction = Reduction::immediate();
  ReducePolicy reduce = ReducePolicy::every_microbatch;
  bool keep_last = true;  // the last unit of forward is the first of backward: stay gathered in between
  // The first prefetch of backward waits until half of the first unit's gradients have come: all activations live when
  // backward begins, so that moment is the peak of memory.
  bool late_first_prefetch = false;
  // On GPUs of one host: gathered weights and reduce slots lie in one arena that is registered with NCCL, so that
  // gathers run on copy engines and reductions as symmetric kernels, where they do not go by `one_sided_gathers` and
  // `reducer`. Off: NCCL's rings instead, and memory from the caching allocator.
  bool symmetric_memory = true;
  // On GPUs of one host: units with shares of 8 MiB and more are gathered by reading the other ranks' shares where they
  // rest, into memory where this rank's share already lies (comm/peer_memory.h). No multiprocessor, no copy of the own
  // share, no wait for peers; all ranks meet once a step before weights are read and once before they are written.
  // Leaves may be written in place after a backward, an evaluation or an unshard_scope; where a forward with gradients
  // never has its backward, only by the library's optimizers or after an evaluation.
  bool one_sided_gathers = true;
  Reducer reducer = Reducer::copy_engine;     // over GPUs of one host
  std::optional<Bytes> symmetric_bytes = {};  // of the arena beyond the resting shards; default: what the policies need
  bool keep_first = false;                    // the first unit of forward stays gathered between microbatches of a step
  bool unify_communication_stream = false;    // gathers and reductions share one stream
  // The last backward of a step ends without a wait for its reductions. The library's optimizers and clip_grad_norm_
  // wait unit by unit, so early units are updated while others are still reduced. Whoever else reads gradients calls
  // FsdpContext::wait_for_gradients before.
  bool overlap_optimizer = false;
  std::optional<Bytes> keep_budget = {};  // for Reshard::by_budget
  bool sync_module_states = true;         // weights and buffers built with values take rank 0's
  // What happens to units that this rank does not run while others may (one expert a unit, say). `error`: ranks that
  // run different units fail with both names. `participate`: gathers and reductions follow the static orders whatever
  // this rank runs, so skipped units take part with zeros, at the price of their gathers.
  SkippedUnits skipped_units = SkippedUnits::error;
  // Compares the parameters of every unit with what was sharded before each forward of a root, and names what was
  // replaced. Costs host time per parameter. (That ranks run the same operations, in the same microbatch, is always
  // checked on CPUs.)
  bool check = false;
  // CPU ranks run collectives up to this payload on the calling thread: a hand-off to a worker costs 10-80 us.
  Bytes inline_limit{64 * 1024};
  std::shared_ptr<trace::Recorder> recorder = nullptr;  // records spans while set
};

struct MicrobatchOptions {
  bool is_last = true;
  std::optional<ReducePolicy> reduce = {};  // default: the context's
};

enum class Phase : std::uint8_t { forward, backward };

}  // namespace fsdp
