// The model that a run trains: a dense transformer under automatic hooks, or a mixture of experts under a schedule.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "apps/fsdp/batch_tensors.h"
#include "apps/fsdp/train_config.h"
#include "fsdp/module/context.h"

namespace fsdp::app {

class TrainedModel {
 public:
  virtual ~TrainedModel() = default;

  [[nodiscard]] virtual const std::shared_ptr<FsdpContext>& context() const = 0;  // with values in its weights
  // Enqueues the forwards and backwards of a step. `scale`: of each microbatch's sum over its targets; undefined: their
  // mean counts, all microbatches alike. Returns the sum of the microbatches' losses in fp64, on the device.
  [[nodiscard]] virtual at::Tensor forward_backward(const std::vector<BatchTensors>& batches,
                                                    const at::Tensor& scale) = 0;
  // What a checkpoint must hold beside weights; equal on all ranks.
  [[nodiscard]] virtual std::vector<std::pair<std::string, at::Tensor>> extra_state() { return {}; }
  // After the optimizer's step.
  virtual void after_step() {}
  // The sum of the losses over a batch's targets, without gradients.
  [[nodiscard]] virtual at::Tensor loss_sum(const BatchTensors& batch) = 0;
  // tokens (batch, position) -> logits (batch, position, vocabulary), without gradients.
  [[nodiscard]] virtual at::Tensor logits(const at::Tensor& tokens) = 0;
};

// Collective: every rank makes it. The seed is run.seed.
[[nodiscard]] std::unique_ptr<TrainedModel> make_trained_model(const World& world, const TrainConfig& config);

}  // namespace fsdp::app
