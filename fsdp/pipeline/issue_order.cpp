#include "fsdp/pipeline/issue_order.h"

#include <algorithm>

namespace fsdp::pipeline {
namespace {

// Appends calls of one microbatch.
class Chain {
 public:
  Chain(std::vector<NodeCall>& calls, std::optional<int> microbatch, const ChunkShape& shape)
      : calls_(calls), microbatch_(microbatch), shape_(shape) {}

  [[nodiscard]] int layers() const { return microbatch_ ? shape_.layers : 0; }
  void add(NodeKind node, Pass pass, int layer = -1) {
    if (microbatch_) calls_.push_back({node, pass, layer, *microbatch_});
  }
  void weights(NodeKind node, int layer) {
    if (shape_.delay_weights) add(node, Pass::weights, layer);
  }

 private:
  std::vector<NodeCall>& calls_;
  std::optional<int> microbatch_;
  ChunkShape shape_;
};

// Layer `i` of the forward beside layer `k` of the backward; -1: none. The gradients of the attention's weights of the
// backward's first layer come later, when nothing else is left to hide what follows.
void layer_pair(Chain& f, int i, Chain& b, int k, bool release_early) {
  const auto forward = [&](NodeKind node) {
    if (i >= 0) f.add(node, Pass::forward, i);
  };
  const auto backward = [&](NodeKind node) {
    if (k >= 0) b.add(node, Pass::backward, k);
  };
  backward(NodeKind::combine);
  forward(NodeKind::attend);
  backward(NodeKind::experts);
  forward(NodeKind::dispatch);
  if (k >= 0) b.weights(NodeKind::experts, k);
  backward(NodeKind::dispatch);
  if (release_early) backward(NodeKind::attend);
  forward(NodeKind::experts);
  forward(NodeKind::combine);
  if (!release_early) backward(NodeKind::attend);
  if (k > 0) b.weights(NodeKind::attend, k);
}

}  // namespace

std::string to_string(const NodeCall& call) {
  static constexpr const char* kNames[] = {"pre", "A", "D", "E", "C", "post", "loss"};
  std::string text = kNames[static_cast<int>(call.node)];
  if (call.layer >= 0) text += std::to_string(call.layer);
  return text + "." + std::to_string(call.microbatch) + "fbw"[static_cast<int>(call.pass)];
}

bool exchanges(NodeKind node) { return node == NodeKind::dispatch || node == NodeKind::combine; }

std::vector<NodeCall> merged_step(std::optional<int> forward, const ChunkShape& forward_shape,
                                  std::optional<int> backward, const ChunkShape& backward_shape) {
  std::vector<NodeCall> calls;
  Chain f(calls, forward, forward_shape), b(calls, backward, backward_shape);
  b.add(NodeKind::loss, Pass::backward);
  f.add(NodeKind::pre, Pass::forward);
  b.add(NodeKind::post, Pass::backward);
  const int pairs = std::min(f.layers(), b.layers());
  for (int i = 0; i < pairs; ++i) layer_pair(f, i, b, b.layers() - 1 - i, backward_shape.release_early);
  for (int i = pairs; i < b.layers(); ++i) layer_pair(f, -1, b, b.layers() - 1 - i, backward_shape.release_early);
  for (int i = pairs; i < f.layers(); ++i) layer_pair(f, i, b, -1, backward_shape.release_early);
  if (b.layers() > 0) b.weights(NodeKind::attend, 0);
  f.add(NodeKind::post, Pass::forward);
  b.add(NodeKind::pre, Pass::backward);
  f.add(NodeKind::loss, Pass::forward);
  return calls;
}

std::vector<std::vector<NodeCall>> one_f_one_b(int microbatches, const ChunkShape& shape) {
  std::vector<std::vector<NodeCall>> steps;
  for (int m = 0; m <= microbatches && microbatches > 0; ++m) {
    const std::optional<int> forward = m < microbatches ? std::optional(m) : std::nullopt;
    const std::optional<int> backward = m > 0 ? std::optional(m - 1) : std::nullopt;
    steps.push_back(merged_step(forward, shape, backward, shape));
  }
  return steps;
}

std::vector<std::vector<NodeCall>> sequential(int microbatches, const ChunkShape& shape) {
  std::vector<std::vector<NodeCall>> steps;
  for (int m = 0; m < microbatches; ++m) {
    auto step = merged_step(m, shape, std::nullopt, shape);
    const auto backward = merged_step(std::nullopt, shape, m, shape);
    step.insert(step.end(), backward.begin(), backward.end());
    steps.push_back(std::move(step));
  }
  return steps;
}

}  // namespace fsdp::pipeline
