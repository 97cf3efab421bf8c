#include "fsdp/pipeline/schedule_node.h"

#include <torch/csrc/autograd/autograd.h>

#include <optional>
#include <utility>

#include "fsdp/base/check.h"

namespace fsdp::pipeline {
namespace {

// Ends also when the node throws.
class Range {
 public:
  Range(Runtime& runtime, const char* name) : runtime_(runtime), id_(runtime.begin_range(name)) {}
  ~Range() { runtime_.end_range(id_); }
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

 private:
  Runtime& runtime_;
  const std::uint64_t id_;
};

// A leaf over the same values, in a graph of its own.
at::Tensor cut(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  return tensor.detach().set_requires_grad(tensor.requires_grad());
}

// The memory goes, sizes stay.
void free_storage(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.is_meta()) return;
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  if (storage->nbytes() != tensor.nbytes()) return;  // a part of something else
  storage->set_data_ptr_noswap(c10::DataPtr(nullptr, tensor.device()));
  storage->set_nbytes(0);
}

}  // namespace

void LayerCarry::put(const std::string& name, const at::Tensor& tensor) {
  const at::Tensor leaf = cut(tensor);
  FSDP_CHECK(leaves_.emplace(name, leaf).second, UsageError, "a node of this layer has already put \"{}\"", name);
  if (leaf.requires_grad()) new_.push_back({tensor, leaf});
}

at::Tensor LayerCarry::get(const std::string& name) const {
  const auto found = leaves_.find(name);
  FSDP_CHECK(found != leaves_.end(), UsageError, "no node before this one has put \"{}\"", name);
  return found->second;
}

std::vector<LayerCarry::Jump> LayerCarry::take_new() { return std::exchange(new_, {}); }

void ScheduleNode::enter() {
  plan_.lanes.stream(options_.lane).wait(plan_.event);
  for (const at::Tensor& tensor : plan_.to_free) free_storage(tensor);
  plan_.to_free.clear();
}

void ScheduleNode::leave() { plan_.lanes.stream(options_.lane).record(plan_.event); }

Tensors ScheduleNode::forward(const Tensors& inputs, const std::function<void()>& before) {
  enter();
  plan_.lanes.run(options_.lane, [&] {
    before();
    const Range range(plan_.lanes.runtime(), options_.range);
    for (const at::Tensor& input : inputs) leaves_.push_back(cut(input));
    std::optional<DelayedWeightGradients::Scope> delay;
    if (options_.delays_weights) delay.emplace(later_);
    results_ = function_(leaves_, *carry_);
  });
  if (carry_) jumps_ = carry_->take_new();
  leave();
  if (options_.frees_input) plan_.to_free.insert(plan_.to_free.end(), inputs.begin(), inputs.end());
  return results_;
}

Tensors ScheduleNode::backward(Tensors gradients, const std::function<void()>& before) {
  FSDP_INVARIANT(gradients.size() == results_.size());
  enter();
  plan_.lanes.run(options_.lane, [&] {
    before();
    const Range range(plan_.lanes.runtime(), options_.range);
    torch::autograd::variable_list roots, root_gradients;
    const auto add = [&](const at::Tensor& root, const at::Tensor& gradient) {
      // An undefined gradient, or a root without history, makes autograd throw.
      if (!root.defined() || !root.requires_grad() || !gradient.defined()) return;
      roots.push_back(root);
      root_gradients.push_back(gradient);
    };
    for (std::size_t i = 0; i < results_.size(); ++i) add(results_[i], gradients[i]);
    for (const auto& jump : jumps_) add(jump.original, jump.leaf.grad());
    // What a graph on the exchange's stream has saved may be compute's memory: the graph is retired below, whole.
    const bool keep_graph = options_.lane == Lane::exchange;
    if (!roots.empty()) torch::autograd::backward(roots, root_gradients, keep_graph);
  });
  leave();
  Tensors result;
  for (const at::Tensor& leaf : leaves_) result.push_back(leaf.defined() ? leaf.grad() : at::Tensor());
  Tensors used = std::move(gradients);
  used.insert(used.end(), leaves_.begin(), leaves_.end());
  used.insert(used.end(), results_.begin(), results_.end());
  for (auto& jump : jumps_) used.insert(used.end(), {jump.original, jump.leaf, jump.leaf.grad()});
  plan_.lanes.retire(std::move(used), options_.lane);
  leaves_.clear();
  results_.clear();
  jumps_.clear();
  carry_.reset();
  return result;
}

void ScheduleNode::backward_weights() {
  plan_.lanes.run(options_.lane, [&] { plan_.lanes.retire(later_.run(), options_.lane); });
}

}  // namespace fsdp::pipeline
