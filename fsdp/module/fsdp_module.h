// A unit: modules whose parameters are gathered and reduced together, and the primitives that drive it.
//
// In automatic mode the hooks of its modules do everything. Caller-driven (UnitOptions::register_hooks = false), an
// outside scheduler calls unshard, reshard and reduce_gradients; several forwards and backwards may be under way, no
// phase is assumed. Calls enqueue; the calling thread's current stream is ordered as each one says. Host thread of the
// rank only.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/module/module_ref.h"
#include "fsdp/module/options.h"
#include "fsdp/module/parameter_group.h"
#include "fsdp/runtime/stream.h"

namespace fsdp {

class ForwardScope;
class Scheduler;

class FsdpModule : public std::enable_shared_from_this<FsdpModule> {
 public:
  using PostBackwardHook = std::function<void(FsdpModule&)>;

  FsdpModule(Scheduler& scheduler, int index, std::vector<std::shared_ptr<torch::nn::Module>> modules,
             UnitOptions options);
  ~FsdpModule();
  FsdpModule(const FsdpModule&) = delete;
  FsdpModule& operator=(const FsdpModule&) = delete;

  [[nodiscard]] const std::string& name() const {
    return names_.unit;
  }  // module path from its root; "<root>" for a root
  [[nodiscard]] int index() const { return index_; }
  [[nodiscard]] const UnitOptions& options() const { return options_; }
  // UnitOptions::backward_reads_weights, or its default for these modules.
  [[nodiscard]] bool backward_reads_weights() const { return backward_reads_weights_; }
  [[nodiscard]] const std::vector<std::unique_ptr<FsdpParameterGroup>>& groups() const { return groups_; }
  [[nodiscard]] std::vector<std::pair<std::string, at::Tensor>> buffers() const;  // by path; the modules' own tensors
  [[nodiscard]] bool gathered() const { return gathered_; }                       // or on its way
  [[nodiscard]] bool ready() const;                                       // gathered with the weights of this step
  [[nodiscard]] Bytes gathered_bytes() const { return gathered_bytes_; }  // while gathered, beyond what rests

  // Gathers the weights unless they are gathered or on their way; in every case the current stream waits for this
  // unit's gather, and for nothing else. `prefetch` also gathers what follows in that phase.
  void unshard(std::optional<Phase> prefetch = std::nullopt);

  // As unshard, but no stream waits: for what is used later.
  void gather();

  // Drops the gathered weights, ordered after everything the current stream has enqueued so far. Nothing to do when
  // nothing is gathered.
  void reshard();

  // Starts the reduction of gradients that are complete. Called by a post-backward hook.
  void reduce_gradients();

  // `hook` runs once per backward window, when every trainable parameter of the unit holds its local gradient; hooks
  // run in order of registration, in automatic mode after the unit's reshard and after its reduction was issued or
  // queued behind those of units before it.
  void register_post_backward_hook(PostBackwardHook hook) { post_backward_hooks_.push_back(std::move(hook)); }

  // For Prefetch::lists: what to gather while this unit computes.
  void set_forward_prefetch(const std::vector<FsdpModule*>& units);
  void set_backward_prefetch(const std::vector<FsdpModule*>& units);

  // --- Called by hooks and gradient accumulators, not by users. ---

  // A gradient of a trainable parameter arrived: countdown, unless it is one beyond those expected.
  void gradient_arrived(bool expected);
  // Opens the window at its first gradient: takes a reduce slot, decides where gradients go.
  void open_window();
  [[nodiscard]] Bytes inline_limit() const;
  [[nodiscard]] Stream compute_stream() const;

 private:
  friend class FsdpContext;
  friend class ForwardScope;
  friend class Scheduler;

  struct Names {
    std::string unit;
    // "FSDP:<unit>:<operation>", interned; labels of collectives and spans.
    const char *forward_compute = "", *backward_compute = "", *unshard = "", *reshard = "", *reduce_gradients = "";
  };
  void set_name(const std::string& name);
  void complete_window();
  // Gathered until `unpin`, whatever releases come in between; for FsdpContext::UnshardScope.
  void pin();
  void unpin();

  Scheduler& scheduler_;
  const int index_;
  std::vector<std::shared_ptr<torch::nn::Module>> modules_;
  UnitOptions options_;
  Names names_;
  std::vector<std::unique_ptr<FsdpParameterGroup>> groups_;
  std::vector<PostBackwardHook> post_backward_hooks_;
  Bytes gathered_bytes_;
  bool releasable_ = false;  // some group's weights really go away on reshard
  bool gets_stale_ = false;  // some group's weights rest whole, but are not current after an optimizer step

  // Weights.
  bool gathered_ = false;  // or on their way: `gathered_event_` says when
  Event gathered_event_;
  std::int64_t epoch_ = -1;      // of the weights that are gathered
  bool waited_ = false;          // compute has waited for `gathered_event_`
  bool kept_ = false;            // counted in the keep budget
  int pins_ = 0;                 // scopes that read the weights: no release meanwhile
  bool release_queued_ = false;  // a delayed release; `read_event_` is where its readers ended
  Event read_event_;
  bool backward_reads_weights_ = true;
  int forwards_left_ = 0;                     // modules of the unit whose forward is still to come
  bool expects_backward_ = true;              // some result of its latest forwards required a gradient; steers prefetch
  std::int64_t expectation_generation_ = -1;  // the scheduler's, when that was noted
  struct Buffer {
    std::string name;      // path from the unit's module until names are set, then from the root
    int module_index = 0;  // which of the unit's modules
    at::Tensor tensor;     // the module's own
  };
  std::vector<Buffer> buffers_;
  bool buffers_on_meta_ = false;
  // Tied weights: units that own weights which this one uses too. They are gathered with it and stay while it is.
  std::vector<FsdpModule*> lenders_;
  bool lends_ = false;      // other units use weights of this one
  bool borrowing_ = false;  // this unit's claim on its lenders
  int borrowers_ = 0;       // units with such a claim on this one
  bool held_ = false;       // gathered for its own sake

  // Gradients of the current backward window. complete: packed, its reduction not issued yet; queued: a delayed
  // reduction.
  enum class Window : std::uint8_t { closed, open, complete, queued };
  Window window_ = Window::closed;
  int pending_ = 0;          // gradients of trainable parameters that have not arrived
  int trainable_count_ = 0;  // of them in a backward that uses all
  // Numbers of the nodes that its tracked forwards made since the last backward ended (backward_watch.h).
  std::uint64_t first_node_ = 0, end_of_nodes_ = 0;
  std::int64_t nodes_generation_ = -1;  // the scheduler's, when they were noted
  // Grows with every write to its leaves, and to its lenders', as far as writes can be seen.
  std::uint64_t weight_version_ = 0;
  bool last_microbatch_ = true;
  int slot_ = -1;
  Event packed_event_;            // where packing of the gradients ends on the compute stream
  Event reduced_event_;           // and their reduction on its own, with ContextOptions::overlap_optimizer
  bool in_backward_ = false;      // its backward began
  bool finished_ = false;         // and ended, in this graph: nothing of it is still to run
  bool reduced_ = false;          // and its reduction was issued
  bool lined_up_ = false;         // in the scheduler's line of reductions
  bool ran_[2] = {false, false};  // [phase] in this pass, under SkippedUnits::participate
  trace::Span* backward_span_ = nullptr;
  std::uint64_t backward_range_ = 0;
};

}  // namespace fsdp
