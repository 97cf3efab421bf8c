// A piece of one microbatch's forward with a graph of its own, so that its backward can be issued when a schedule
// likes.
//
// Inputs are cut off into fresh leaves; backward is one autograd run from the node's results to these leaves, whose
// gradients are the results' gradients of the node before. A merged step thus is many small autograd runs: nothing may
// hang on "the end of backward".
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/module/delayed_weight_gradients.h"
#include "fsdp/pipeline/lanes.h"
#include "fsdp/pipeline/staged_model.h"

namespace fsdp::pipeline {

// What the nodes of one microbatch in one layer share.
class LayerCarry final : public Carry {
 public:
  void put(const std::string& name, const at::Tensor& tensor) override;
  [[nodiscard]] at::Tensor get(const std::string& name) const override;

  struct Jump {
    at::Tensor original, leaf;
  };
  // Those that were put since the last call; they belong to the node that ran.
  [[nodiscard]] std::vector<Jump> take_new();

 private:
  std::map<std::string, at::Tensor> leaves_;
  std::vector<Jump> new_;
};

// Orders the nodes of one microbatch: each waits for it on its own stream, runs, and records it anew. The host's order
// makes the chain; microbatches have different events, which is their independence.
struct PlanState {
  explicit PlanState(Lanes& l) : lanes(l) {}
  Lanes& lanes;
  Event event;
  // Storages that may go once a node of the other lane has waited: they were read by the last node.
  std::vector<at::Tensor> to_free;
};

struct NodeOptions {
  Lane lane = Lane::compute;
  bool frees_input = false;
  bool delays_weights = false;
  const char* range = "";  // name in profilers, interned
};

class ScheduleNode {
 public:
  ScheduleNode(PlanState& plan, std::shared_ptr<LayerCarry> carry, NodeFunction function, NodeOptions options)
      : plan_(plan), carry_(std::move(carry)), function_(std::move(function)), options_(options) {}

  // `before`: what the node needs of others on its stream, such as gathered weights.
  Tensors forward(const Tensors& inputs, const std::function<void()>& before);
  // Gradients of the results (undefined where there is none) -> those of the inputs. The node's graph is gone then.
  Tensors backward(Tensors gradients, const std::function<void()>& before);
  // What backward left. Orders nothing: nothing later in the chain depends on it.
  void backward_weights();

 private:
  void enter();
  void leave();

  PlanState& plan_;
  std::shared_ptr<LayerCarry> carry_;
  NodeFunction function_;
  NodeOptions options_;
  Tensors leaves_, results_;
  std::vector<LayerCarry::Jump> jumps_;
  DelayedWeightGradients later_;
};

}  // namespace fsdp::pipeline
