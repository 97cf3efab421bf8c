#include "fsdp/pipeline/issue_order.h"

#include <algorithm>
#include <utility>

#include "fsdp/base/check.h"

namespace fsdp::pipeline {
namespace {

// Appends calls of one microbatch.
class Chain {
 public:
  Chain(std::vector<NodeCall>& calls, std::optional<int> microbatch, const ChunkShape& shape)
      : calls_(calls), microbatch_(microbatch), shape_(shape) {}

  [[nodiscard]] int layers() const { return microbatch_ ? shape_.layers : 0; }
  [[nodiscard]] bool first() const { return shape_.first; }
  [[nodiscard]] bool last() const { return shape_.last; }
  void add(NodeKind node, Pass pass, int layer = -1) {
    if (microbatch_) calls_.push_back({node, pass, layer, *microbatch_, shape_.chunk});
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
  static constexpr const char* kNames[] = {"pre", "A", "D", "E", "C", "post", "loss", "previous", "next"};
  std::string text = kNames[static_cast<int>(call.node)];
  if (call.layer >= 0) text += std::to_string(call.layer);
  if (call.chunk > 0) text += "@" + std::to_string(call.chunk);
  return text + "." + std::to_string(call.microbatch) + "fbw"[static_cast<int>(call.pass)];
}

bool exchanges(NodeKind node) { return node == NodeKind::dispatch || node == NodeKind::combine; }

bool arrives(const NodeCall& call) {
  return (call.node == NodeKind::previous && call.pass == Pass::forward) ||
         (call.node == NodeKind::next && call.pass == Pass::backward);
}

std::vector<NodeCall> merged_step(std::optional<int> forward, const ChunkShape& forward_shape,
                                  std::optional<int> backward, const ChunkShape& backward_shape) {
  std::vector<NodeCall> calls;
  Chain f(calls, forward, forward_shape), b(calls, backward, backward_shape);
  b.add(b.last() ? NodeKind::loss : NodeKind::next, Pass::backward);
  f.add(f.first() ? NodeKind::pre : NodeKind::previous, Pass::forward);
  if (b.last()) b.add(NodeKind::post, Pass::backward);
  const int pairs = std::min(f.layers(), b.layers());
  for (int i = 0; i < pairs; ++i) layer_pair(f, i, b, b.layers() - 1 - i, backward_shape.release_early);
  for (int i = pairs; i < b.layers(); ++i) layer_pair(f, -1, b, b.layers() - 1 - i, backward_shape.release_early);
  for (int i = pairs; i < f.layers(); ++i) layer_pair(f, i, b, -1, backward_shape.release_early);
  // What other stages wait for is sent before the weight gradients that were kept for this.
  if (!f.last()) f.add(NodeKind::next, Pass::forward);
  if (!b.first()) b.add(NodeKind::previous, Pass::backward);
  if (b.layers() > 0) b.weights(NodeKind::attend, 0);
  if (f.last()) f.add(NodeKind::post, Pass::forward);
  if (b.first()) b.add(NodeKind::pre, Pass::backward);
  if (f.last()) f.add(NodeKind::loss, Pass::forward);
  return calls;
}

std::vector<std::vector<NodeCall>> pipeline_steps(int microbatches, const PipelineShape& shape, bool merged) {
  const int stages = shape.stages, chunks = static_cast<int>(shape.chunks.size());
  FSDP_CHECK(chunks == 1 || microbatches % stages == 0, UsageError,
             "a pipeline of {} stages with {} chunks each runs a multiple of {} microbatches a step, got {}", stages,
             chunks, stages, microbatches);
  // Forward `k` of a rank: as many microbatches as there are stages go through one chunk before the next one.
  struct Turn {
    int microbatch, chunk;
  };
  const auto turn = [&](int k) {
    if (chunks == 1) return Turn{k, 0};
    const int within = k % (stages * chunks);
    return Turn{k / (stages * chunks) * stages + within % stages, within / stages};
  };
  const int turns = microbatches * chunks;
  // A forward and the backward beside it end together, so a microbatch's way to the next stage and its gradient's way
  // back take a step each.
  const int ahead = std::min(turns, 2 * (stages - 1 - shape.stage) + (chunks - 1) * stages + 1);
  std::vector<std::vector<NodeCall>> steps;
  for (int k = 0; k < turns + ahead; ++k) {
    std::optional<int> forward, backward;
    ChunkShape f, b;
    if (k < turns) {
      const Turn t = turn(k);
      forward = t.microbatch;
      f = shape.chunks[static_cast<std::size_t>(t.chunk)];
    }
    if (k >= ahead) {
      const Turn t = turn(k - ahead);
      backward = t.microbatch;
      b = shape.chunks[static_cast<std::size_t>(chunks - 1 - t.chunk)];
    }
    if (merged) {
      steps.push_back(merged_step(forward, f, backward, b));
    } else {
      auto step = merged_step(forward, f, std::nullopt, b);
      const auto after = merged_step(std::nullopt, f, backward, b);
      step.insert(step.end(), after.begin(), after.end());
      steps.push_back(std::move(step));
    }
  }
  return steps;
}

std::vector<std::vector<NodeCall>> one_f_one_b(int microbatches, const ChunkShape& shape) {
  return pipeline_steps(microbatches, {.chunks = {shape}});
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
