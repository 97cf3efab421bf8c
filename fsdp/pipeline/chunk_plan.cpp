#include "fsdp/pipeline/chunk_plan.h"

#include <ATen/ops/full_like.h>
#include <ATen/ops/zeros.h>
#include <fmt/ranges.h>

#include "fsdp/base/check.h"
#include "fsdp/base/intern.h"
#include "fsdp/pipeline/stage_channels.h"

namespace fsdp::pipeline {
namespace {

int slot(NodeKind node) { return static_cast<int>(node) - static_cast<int>(NodeKind::attend); }

constexpr int kKinds = static_cast<int>(NodeKind::loss) + 1;  // those with functions

}  // namespace

NodeRanges::NodeRanges(int layers, int chunk) {
  static constexpr const char* kNames[kKinds] = {"pre", "attend", "dispatch", "experts", "combine", "post", "loss"};
  for (int layer = -1; layer < layers; ++layer) {
    std::string prefix = chunk == 0 ? "FSDP:node:" : "FSDP:node:chunk" + std::to_string(chunk) + ":";
    if (layer >= 0) prefix += std::to_string(layer) + ":";
    for (const char* name : kNames) names_.push_back(intern(prefix + name));
  }
}

const char* NodeRanges::of(const NodeCall& call) const {
  return names_[static_cast<std::size_t>((call.layer + 1) * kKinds + static_cast<int>(call.node))];
}

ChunkPlan::ChunkPlan(StagedModel& model, Lanes& lanes, const NodeRanges& ranges, StageChannels* channels,
                     Microbatch data, bool delay_weights, double loss_scale)
    : model_(model),
      ranges_(ranges),
      channels_(channels),
      state_(lanes),
      data_(std::move(data)),
      delay_weights_(delay_weights),
      loss_scale_(loss_scale),
      flow_(data_.inputs) {
  lanes.stream(Lane::compute).record(state_.event);
}

std::unique_ptr<ScheduleNode>& ChunkPlan::node(const NodeCall& call) {
  switch (call.node) {
    case NodeKind::pre:
      return pre_;
    case NodeKind::post:
      return post_;
    case NodeKind::loss:
      return loss_node_;
    default:
      return layers_.at(call.layer).nodes[static_cast<std::size_t>(slot(call.node))];
  }
}

std::unique_ptr<ScheduleNode> ChunkPlan::make_node(const NodeCall& call) {
  NodeOptions options{.range = ranges_.of(call)};
  NodeFunction function;
  std::shared_ptr<LayerCarry> carry;
  if (call.layer < 0) {
    carry = std::make_shared<LayerCarry>();
    function = call.node == NodeKind::pre    ? model_.pre_function()
               : call.node == NodeKind::post ? model_.post_function()
                                             : model_.loss_function();
  } else {
    Layer& layer = layers_[call.layer];
    if (!layer.carry) {
      layer.carry = std::make_shared<LayerCarry>();
      layer.functions = model_.layer_functions(call.layer, loss_scale_);
    }
    carry = layer.carry;
    auto& f = layer.functions;
    const bool dense = model_.dense(call.layer);
    if (exchanges(call.node) && !dense) options.lane = Lane::exchange;
    options.delays_weights = delay_weights_ && !exchanges(call.node);
    switch (call.node) {
      case NodeKind::attend:
        function = std::move(f.attend);
        break;
      case NodeKind::dispatch:
        function = std::move(f.dispatch);
        options.frees_input = f.dispatch_frees_input && !dense;
        break;
      case NodeKind::experts:
        function = std::move(f.experts);
        options.frees_input = f.experts_frees_input && !dense;
        break;
      default:
        function = std::move(f.combine);
        options.frees_input = f.combine_frees_input && !dense;
    }
  }
  return std::make_unique<ScheduleNode>(state_, std::move(carry), std::move(function), options);
}

// What arrives becomes the event that the next node waits for, and not what computes now: the other microbatch goes on.
void ChunkPlan::cross(const NodeCall& call) {
  using Way = StageChannels::Way;
  const Way way = call.pass == Pass::forward ? Way::activations : Way::gradients;
  if (arrives(call)) {
    flow_ = {channels_->take(way, state_.event)};
    // On CPUs the arithmetic of both lanes is this thread's.
    if (!state_.lanes.runtime().enqueue_sets_current_stream()) state_.lanes.stream(Lane::compute).wait(state_.event);
    if (call.pass == Pass::forward) flow_[0].requires_grad_();
    return;
  }
  FSDP_CHECK(flow_.size() == 1, UsageError, "between pipeline stages one tensor is sent, not {}", flow_.size());
  const Boundary boundary = model_.boundary(data_);
  at::Tensor tensor = flow_[0];
  if (!tensor.defined() || !tensor.is_contiguous()) {
    const Stream compute = state_.lanes.stream(Lane::compute);
    compute.wait(state_.event);
    const auto options = at::TensorOptions().dtype(boundary.dtype).device(state_.lanes.runtime().device());
    tensor = tensor.defined() ? tensor.detach().contiguous() : at::zeros(boundary.sizes, options);
    compute.record(state_.event);
  }
  FSDP_CHECK(tensor.sizes() == at::IntArrayRef(boundary.sizes) && tensor.scalar_type() == boundary.dtype, UsageError,
             "a part of a model gives its neighbour {} of {}, but its boundary() says {} of {}",
             fmt::join(tensor.sizes(), "x"), c10::toString(tensor.scalar_type()), fmt::join(boundary.sizes, "x"),
             c10::toString(boundary.dtype));
  channels_->send(way, tensor, state_.event);
  flow_.clear();
}

void ChunkPlan::run(const NodeCall& call, const std::function<void()>& before) {
  if (call.node == NodeKind::previous || call.node == NodeKind::next) return cross(call);
  if (call.pass == Pass::forward) {
    auto made = make_node(call);
    if (call.node == NodeKind::loss) flow_.insert(flow_.end(), data_.targets.begin(), data_.targets.end());
    flow_ = made->forward(flow_, before);
    node(call) = std::move(made);
    if (call.node != NodeKind::loss) return;
    FSDP_CHECK(flow_.size() == 1 && flow_[0].numel() == 1, UsageError,
               "a model's loss function must give one scalar, got {} tensors", flow_.size());
    loss_ = flow_[0].detach();
    flow_ = {at::full_like(loss_, loss_scale_)};
    return;
  }
  auto& existing = node(call);
  FSDP_INVARIANT(existing != nullptr);
  if (call.pass == Pass::weights) {
    existing->backward_weights();
  } else {
    flow_ = existing->backward(std::move(flow_), before);
    if (call.node == NodeKind::loss) flow_.resize(flow_.size() - data_.targets.size());
  }
  const bool more = delay_weights_ && call.pass == Pass::backward &&
                    (call.node == NodeKind::attend || call.node == NodeKind::experts);
  if (!more) existing.reset();
  if (call.layer < 0) return;
  Layer& layer = layers_.at(call.layer);
  bool over = true;
  for (const auto& n : layer.nodes) over &= n == nullptr;
  if (over) layers_.erase(call.layer);
}

void ChunkPlan::join() { state_.lanes.stream(Lane::compute).wait(state_.event); }

}  // namespace fsdp::pipeline
