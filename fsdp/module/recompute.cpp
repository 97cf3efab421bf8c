#include "fsdp/module/recompute.h"

#include <ATen/ThreadLocalState.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/alias.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <optional>

#include "fsdp/base/check.h"
#include "fsdp/mesh/rank_generator.h"
#include "fsdp/module/recompute_state.h"
#include "fsdp/module/scheduler.h"

namespace fsdp {

RecomputeState& recompute_state() {
  static thread_local RecomputeState state;
  return state;
}

int backward_task() {
  const RecomputeState& state = recompute_state();
  return state.depth > 0 ? state.outermost_task : torch::autograd::get_current_graph_task_id();
}

namespace {

using torch::autograd::variable_list;

// Of the rank on the CPU, and of the device that the function's arguments are on, if that is another.
struct RandomState {
  at::Tensor cpu, device;
  c10::Device device_of_arguments = c10::kCPU;
};

at::Tensor state_of(at::Generator generator) {
  std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

void set_state(at::Generator generator, const at::Tensor& state) {
  std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

RandomState random_state(c10::Device device) {
  RandomState state{state_of(rank_generator()), {}, device};
  if (device.is_cuda()) state.device = state_of(generator_for(device));
  return state;
}

void set_random_state(const RandomState& state) {
  set_state(rank_generator(), state.cpu);
  if (state.device.defined()) set_state(generator_for(state.device_of_arguments), state.device);
}

// Random numbers as at the first run; what comes after goes on as if there had been no second one.
class RandomScope {
 public:
  explicit RandomScope(const RandomState& state) : outside_(random_state(state.device_of_arguments)) {
    set_random_state(state);
  }
  ~RandomScope() { set_random_state(outside_); }
  RandomScope(const RandomScope&) = delete;
  RandomScope& operator=(const RandomScope&) = delete;

 private:
  RandomState outside_;
};

// A backward inside a backward, on the same thread. Leaving it normally (`ended`) ends the backward of the units that
// began inside.
class NestedBackward {
 public:
  NestedBackward() : state_(recompute_state()) {
    if (state_.depth++ > 0) return;
    state_.outermost_task = torch::autograd::get_current_graph_task_id();
    state_.at_end = std::make_shared<std::vector<std::function<void()>>>();
    torch::autograd::Engine::get_default_engine().queue_callback([actions = state_.at_end] {
      for (auto& action : *actions) action();
    });
  }
  ~NestedBackward() {
    if (--state_.depth > 0) return;
    state_.outermost_task = -1;
    state_.at_end.reset();
    state_.schedulers.clear();
  }
  NestedBackward(const NestedBackward&) = delete;
  NestedBackward& operator=(const NestedBackward&) = delete;

  void ended() {
    for (Scheduler* scheduler : state_.schedulers) scheduler->nested_backward_ended(state_.depth);
  }

 private:
  RecomputeState& state_;
};

class RecomputeBackward final : public torch::autograd::Node {
 public:
  RecomputeBackward(std::unique_ptr<detail::RecomputedCall> call, variable_list inputs, RandomState random,
                    const at::ThreadLocalState& thread_state)
      : call_(std::move(call)), inputs_(std::move(inputs)), random_(std::move(random)), thread_state_(thread_state) {
    for (const auto& input : inputs_) versions_.push_back(version(input));
  }

  [[nodiscard]] std::string name() const override { return "fsdp::RecomputeBackward"; }

  // [output of the function] -> sizes, for the comparison
  std::vector<std::vector<std::int64_t>> sizes;
  std::vector<int> tracked;  // [input of this node] -> output of the function

  variable_list apply(variable_list&& gradients) override {
    FSDP_CHECK(call_ != nullptr, UsageError,
               "recompute: a second backward through a recomputed function whose graph was freed: pass retain_graph to "
               "the first");
    FSDP_CHECK(!at::GradMode::is_enabled(), UsageError,
               "recompute: gradients of gradients (create_graph) cannot pass through a recomputed function");
    const auto* chosen = torch::autograd::get_current_graph_task_exec_info();
    FSDP_CHECK(chosen == nullptr || chosen->empty(), UsageError,
               "recompute: autograd::grad, or a backward for chosen inputs, cannot pass through a recomputed function: "
               "call backward() and read .grad");
    variable_list leaves;
    for (std::size_t i = 0; i < inputs_.size(); ++i) {
      FSDP_CHECK(version(inputs_[i]) == versions_[i], UsageError,
                 "recompute: argument tensor {} was changed in place after the first run, the second would see other "
                 "values: pass a clone",
                 i);
      if (!inputs_[i].defined()) {
        leaves.emplace_back();
        continue;
      }
      leaves.push_back(inputs_[i].detach());
      leaves.back().set_requires_grad(inputs_[i].requires_grad());
    }
    NestedBackward nested;
    variable_list outputs;
    {
      at::ThreadLocalStateGuard thread_state(thread_state_);
      at::AutoGradMode grad_mode(true);
      RandomScope random(random_);
      outputs = call_->run(leaves);
    }
    compare(outputs);
    variable_list roots, root_gradients;
    for (std::size_t k = 0; k < tracked.size(); ++k) {
      const at::Tensor& output = outputs[tracked[k]];
      if (!gradients[k].defined() || !output.requires_grad()) continue;
      roots.push_back(output);
      root_gradients.push_back(std::move(gradients[k]));
    }
    outputs.clear();
    if (!roots.empty()) torch::autograd::backward(roots, root_gradients);
    nested.ended();
    variable_list result;
    for (const auto& leaf : leaves) result.push_back(leaf.defined() ? leaf.grad() : at::Tensor());
    return result;
  }

  void release_variables() override {
    call_.reset();
    inputs_.clear();
  }

 private:
  static std::int64_t version(const at::Tensor& tensor) {
    return tensor.defined() && !tensor.is_inference() ? static_cast<std::int64_t>(tensor._version()) : -1;
  }

  void compare(const variable_list& outputs) const {
    bool same = outputs.size() == sizes.size();
    for (std::size_t i = 0; same && i < outputs.size(); ++i)
      same = outputs[i].defined() ? outputs[i].sizes() == at::IntArrayRef(sizes[i]) : sizes[i].empty();
    FSDP_CHECK(same, UsageError,
               "recompute: the second run returned other tensors than the first ({} tensors, then {}; or other "
               "shapes): the function must depend on its arguments, weights and random numbers only",
               sizes.size(), outputs.size());
  }

  std::unique_ptr<detail::RecomputedCall> call_;
  variable_list inputs_;
  std::vector<std::int64_t> versions_;  // [input]
  RandomState random_;
  at::ThreadLocalState thread_state_;
};

}  // namespace

namespace detail {

struct FirstRun::State {
  at::ThreadLocalState thread_state;
  RandomState random;
  bool tracked_later = std::exchange(recompute_state().tracks_later, true);
  const FsdpModule* first_unit = std::exchange(recompute_state().first_unit, nullptr);
  std::optional<at::NoGradGuard> no_grad;

  ~State() {
    recompute_state().tracks_later = tracked_later;
    recompute_state().first_unit = first_unit;
  }
};

FirstRun::FirstRun(const std::vector<at::Tensor>& inputs) : state_(std::make_unique<State>()) {
  const auto on_device =
      std::find_if(inputs.begin(), inputs.end(), [](const at::Tensor& t) { return t.defined() && t.is_cuda(); });
  state_->random = random_state(on_device == inputs.end() ? c10::Device(c10::kCPU) : on_device->device());
  state_->no_grad.emplace();
}
FirstRun::~FirstRun() = default;

void FirstRun::attach(std::unique_ptr<RecomputedCall> call, std::vector<at::Tensor> inputs,
                      std::vector<at::Tensor>& outputs) {
  auto edges = torch::autograd::collect_next_edges(inputs);
  auto node =
      std::make_shared<RecomputeBackward>(std::move(call), std::move(inputs), state_->random, state_->thread_state);
  state_.reset();  // tracked again
  node->set_next_edges(std::move(edges));
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    at::Tensor& output = outputs[i];
    node->sizes.push_back(output.defined() ? output.sizes().vec() : std::vector<std::int64_t>());
    if (!output.defined() || !output.is_floating_point()) continue;
    {
      at::AutoDispatchBelowADInplaceOrView below_autograd;  // a tensor of its own, also where an input came through
      output = at::alias(output);
    }
    node->tracked.push_back(static_cast<int>(i));
    torch::autograd::set_history(output, node);
  }
}

}  // namespace detail
}  // namespace fsdp
