// The order in which a training step issues the pieces of its microbatches' forwards and backwards. Pure policy.
//
// A layer of a mixture of experts is a chain of four nodes: A attention and router, D dispatch of the tokens to the
// ranks of their experts, E the experts, C combine (the way home). D and C are exchanges between ranks. Fine-grained
// 1F1B issues the forward of one microbatch between the pieces of the backward of the one before: the two do not depend
// on each other, so that whenever one exchanges the other computes. The mathematics is that of the sequential order.
// (Megatron-LM's combined 1F1B; DeepSeek-V3 technical report, arXiv:2412.19437, section 3.2.1.)
//
// With pipeline stages, rank p of P holds parts p, P + p, 2 P + p, ... of the layers (interleaved 1F1B: Narayanan et
// al., arXiv:2104.04473), and a merged step pairs the forward of one microbatch in one of its parts with the backward
// of another. One more forward than usual comes first, so that the two never depend on each other, on the last stage
// either.
//
// Every rank of a stage issues the same order, for exchanges are collectives.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace fsdp::pipeline {

enum class NodeKind : std::uint8_t {
  pre,       // embedding
  attend,    // A: attention, residual, norm, shared expert, router, counts, local permutation
  dispatch,  // D: tokens and their weights to the ranks of their experts
  experts,   // E
  combine,   // C: results home, unpermuted and summed
  post,      // last norm (without layers), output head
  loss,
  previous,  // instead of pre: forward takes what the stage before computed, backward sends it the gradient
  next,      // instead of post and loss: forward sends on what the layers computed, backward takes its gradient
};

enum class Pass : std::uint8_t { forward, backward, weights };  // weights: the gradients that a backward put off

struct NodeCall {
  NodeKind node = NodeKind::pre;
  Pass pass = Pass::forward;
  int layer = -1;  // of the chunk; -1 for those that belong to none
  int microbatch = 0;
  int chunk = 0;  // of the rank's parts of the model
  bool operator==(const NodeCall&) const = default;
};

// "A0.1f": node A of layer 0, microbatch 1, forward; "A0@1.1f" in chunk 1
[[nodiscard]] std::string to_string(const NodeCall& call);
// Those of D and C, of layers that have them, run on the stream of exchanges.
[[nodiscard]] bool exchanges(NodeKind node);
// Whether it takes what another stage has sent.
[[nodiscard]] bool arrives(const NodeCall& call);

// What the order depends on.
struct ChunkShape {
  int layers = 0;              // of the chunk
  bool delay_weights = true;   // weight gradients of A and E apart from their backwards
  bool release_early = false;  // A's backward before the next experts: its activations go sooner, less hides
  int chunk = 0;               // its number among the rank's chunks
  bool first = true;           // it begins with the embedding, not with what another stage sends
  bool last = true;            // it ends with the loss
};

// One merged step: the forward of one microbatch and the backward of another, either of which may be absent. Chunks may
// have different numbers of layers.
[[nodiscard]] std::vector<NodeCall> merged_step(std::optional<int> forward, const ChunkShape& forward_shape,
                                                std::optional<int> backward, const ChunkShape& backward_shape);

// A rank's place in a pipeline: its chunks are parts stage, stages + stage, 2 stages + stage, ... of the model.
struct PipelineShape {
  int stages = 1, stage = 0;
  std::vector<ChunkShape> chunks = {ChunkShape{}};
};

// The steps of a whole iteration over `microbatches`. A step ends where both plans join the caller's stream, and what
// it sends is there for other stages' next steps. Not merged: a step's forward comes before its backward. Throws
// UsageError when several chunks a rank meet a number of microbatches that is no multiple of the stages.
[[nodiscard]] std::vector<std::vector<NodeCall>> pipeline_steps(int microbatches, const PipelineShape& shape,
                                                                bool merged = true);

// Those of one stage with one chunk.
[[nodiscard]] std::vector<std::vector<NodeCall>> one_f_one_b(int microbatches, const ChunkShape& shape);
// Forward and backward of each microbatch in turn, a step each.
[[nodiscard]] std::vector<std::vector<NodeCall>> sequential(int microbatches, const ChunkShape& shape);

}  // namespace fsdp::pipeline
