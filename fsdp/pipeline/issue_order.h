// The order in which a training step issues the pieces of its microbatches' forwards and backwards. Pure policy.
//
// A layer of a mixture of experts is a chain of four nodes: A attention and router, D dispatch of the tokens to the
// ranks of their experts, E the experts, C combine (the way home). D and C are exchanges between ranks. Fine-grained
// 1F1B issues the forward of one microbatch between the pieces of the backward of the one before: the two do not depend
// on each other, so that whenever one exchanges the other computes. The mathematics is that of the sequential order.
// (Megatron-LM's combined 1F1B; DeepSeek-V3 technical report, arXiv:2412.19437, section 3.2.1.)
//
// Every rank issues the same order, for exchanges are collectives.
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
};

enum class Pass : std::uint8_t { forward, backward, weights };  // weights: the gradients that a backward put off

struct NodeCall {
  NodeKind node = NodeKind::pre;
  Pass pass = Pass::forward;
  int layer = -1;  // of the chunk; -1 for pre, post and loss
  int microbatch = 0;
  bool operator==(const NodeCall&) const = default;
};

[[nodiscard]] std::string to_string(const NodeCall& call);  // "A0.1f": node A of layer 0, microbatch 1, forward
// Those of D and C, of layers that have them, run on the stream of exchanges.
[[nodiscard]] bool exchanges(NodeKind node);

// What the order depends on.
struct ChunkShape {
  int layers = 0;              // of the chunk
  bool delay_weights = true;   // weight gradients of A and E apart from their backwards
  bool release_early = false;  // A's backward before the next experts: its activations go sooner, less hides
};

// One merged step: the forward of one microbatch and the backward of another, either of which may be absent. Chunks may
// have different numbers of layers.
[[nodiscard]] std::vector<NodeCall> merged_step(std::optional<int> forward, const ChunkShape& forward_shape,
                                                std::optional<int> backward, const ChunkShape& backward_shape);

// The steps of a whole iteration over `microbatches`, without pipeline stages. A step ends where both plans join the
// caller's stream.
[[nodiscard]] std::vector<std::vector<NodeCall>> one_f_one_b(int microbatches, const ChunkShape& shape);
// Forward and backward of each microbatch in turn, a step each.
[[nodiscard]] std::vector<std::vector<NodeCall>> sequential(int microbatches, const ChunkShape& shape);

}  // namespace fsdp::pipeline
