// The nodes of one microbatch through a model, made at its first node and gone after its last.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "fsdp/pipeline/schedule_node.h"

namespace fsdp::pipeline {

class StageChannels;

// Names of nodes in profilers, "FSDP:node:3:experts"; made once, one for all microbatches.
class NodeRanges {
 public:
  NodeRanges(int layers, int chunk);
  [[nodiscard]] const char* of(const NodeCall& call) const;

 private:
  std::vector<const char*> names_;  // [(layer + 1) * kinds + node], interned
};

class ChunkPlan {
 public:
  // `channels`: where tensors of other parts come from and go to; null when the model is whole.
  ChunkPlan(StagedModel& model, Lanes& lanes, const NodeRanges& ranges, StageChannels* channels, Microbatch data,
            bool delay_weights, double loss_scale);

  // Runs one node; calls come in the order of the chain.
  void run(const NodeCall& call, const std::function<void()>& before);

  [[nodiscard]] const at::Tensor& loss() const { return loss_; }  // once its forward ran; no graph
  void join();                                                    // the caller's stream waits for the last node

 private:
  struct Layer {
    std::shared_ptr<LayerCarry> carry;
    StagedModel::LayerFunctions functions;
    std::array<std::unique_ptr<ScheduleNode>, 4> nodes;  // [A, D, E, C]
  };
  [[nodiscard]] std::unique_ptr<ScheduleNode> make_node(const NodeCall& call);
  [[nodiscard]] std::unique_ptr<ScheduleNode>& node(const NodeCall& call);
  void cross(const NodeCall& call);  // to or from another part

  StagedModel& model_;
  const NodeRanges& ranges_;
  StageChannels* const channels_;
  PlanState state_;
  const Microbatch data_;
  const bool delay_weights_;
  const double loss_scale_;
  std::map<int, Layer> layers_;
  std::unique_ptr<ScheduleNode> pre_, post_, loss_node_;
  Tensors flow_;  // results of the last forward, or gradients of the last backward
  at::Tensor loss_;
};

}  // namespace fsdp::pipeline
