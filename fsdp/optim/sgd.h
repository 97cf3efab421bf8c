// Stochastic gradient descent with momentum over flat shards.
#pragma once

#include "fsdp/optim/optimizer.h"

namespace fsdp {

struct SgdOptions {
  double learning_rate = 1e-2;
  double momentum = 0.0;
  double weight_decay = 0.0;
  bool nesterov = false;
};

class Sgd final : public ShardedOptimizer {
 public:
  explicit Sgd(FsdpContext& context, const SgdOptions& options = {},
               const ParameterOptionsFunction& parameter_options = {});

 private:
  void update(const std::vector<ShardRun*>& runs, const std::vector<at::Tensor>& gradients,
              const ParameterOptions& options, const std::optional<at::Tensor>& skip) override;
  SgdOptions options_;
};

}  // namespace fsdp
