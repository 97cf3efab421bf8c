// What a schedule needs of a model: its forward cut where ranks exchange tokens.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/module/fsdp_module.h"
#include "fsdp/moe/expert_exchange.h"
#include "fsdp/pipeline/issue_order.h"

namespace fsdp::pipeline {

using Tensors = std::vector<at::Tensor>;

// Tensors that jump over nodes of one layer: a residual from A to C, say.
class Carry {
 public:
  virtual ~Carry() = default;
  // In the node that makes it. Returns nothing: the node itself goes on with its own tensor.
  virtual void put(const std::string& name, const at::Tensor& tensor) = 0;
  // In a later node: the value, cut off from the graph of the node that made it; gradients find their way back.
  [[nodiscard]] virtual at::Tensor get(const std::string& name) const = 0;
};

// Runs on leaves that are cut off from the graph before; its results are the next node's input.
using NodeFunction = std::function<Tensors(const Tensors& inputs, Carry& carry)>;

// What one microbatch feeds in.
struct Microbatch {
  Tensors inputs;   // of node pre; pipeline stages without it read their sizes only
  Tensors targets;  // what node loss compares with; given to it behind the results of post
};

// What crosses from one part of a model to the next.
struct Boundary {
  std::vector<std::int64_t> sizes;
  c10::ScalarType dtype = c10::kFloat;
};

// A model, or one of the parts that pipeline stages hold.
class StagedModel {
 public:
  virtual ~StagedModel() = default;

  [[nodiscard]] virtual int layers() const = 0;
  // A part begins with node pre, or with one tensor of the part before; it ends with post and loss, or with one tensor
  // for the part after. The functions of nodes that it does not have are not asked for.
  [[nodiscard]] virtual bool first() const { return true; }
  [[nodiscard]] virtual bool last() const { return true; }
  // Of a microbatch between two parts: the same on all ranks.
  [[nodiscard]] virtual Boundary boundary(const Microbatch&) const {
    detail::fail<UsageError>("a part of a model must say by boundary() what its neighbours send");
  }
  // The layer has no experts of its own to exchange with: D and C hand their input through.
  [[nodiscard]] virtual bool dense(int layer) const = 0;
  // The functions of one microbatch's nodes share what they must (counts of tokens, permutations) through what they
  // capture, never through the module alone: several microbatches are under way at once. Asked for once a microbatch
  // and layer. Losses of the layer's own (load balancing) have the gradient `loss_scale`, as the microbatch's loss has.
  struct LayerFunctions {
    NodeFunction attend, dispatch, experts, combine;
    // Whether a node's input may lose its memory after its forward: nothing in its backward reads it, and the node
    // before does not either.
    bool dispatch_frees_input = false, experts_frees_input = false, combine_frees_input = false;
  };
  [[nodiscard]] virtual LayerFunctions layer_functions(int layer, double loss_scale) = 0;
  [[nodiscard]] virtual NodeFunction pre_function() = 0;
  [[nodiscard]] virtual NodeFunction post_function() = 0;
  [[nodiscard]] virtual NodeFunction loss_function() = 0;  // -> one scalar
  // Units whose weights a node reads, in forward and in backward; none for D and C of a layer that exchanges.
  [[nodiscard]] virtual std::vector<FsdpModule*> units(NodeKind node, int layer) const = 0;
  // Null where no layer exchanges anything.
  [[nodiscard]] virtual std::shared_ptr<moe::ExpertExchange> exchange() const = 0;
};

}  // namespace fsdp::pipeline
