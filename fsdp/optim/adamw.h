// AdamW (Loshchilov and Hutter, arXiv 1711.05101) over flat shards.
#pragma once

#include "fsdp/optim/optimizer.h"

namespace fsdp {

struct AdamWOptions {
  double learning_rate = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double epsilon = 1e-8;
  double weight_decay = 1e-2;
};

class AdamW final : public ShardedOptimizer {
 public:
  explicit AdamW(FsdpContext& context, const AdamWOptions& options = {},
                 const ParameterOptionsFunction& parameter_options = {});

 private:
  void update(const std::vector<ShardRun*>& runs, const std::vector<at::Tensor>& gradients,
              const ParameterOptions& options, const std::optional<at::Tensor>& skip) override;
  void update_on_device(const std::vector<DeviceRun>& runs, const at::Tensor& learning_rate,
                        const std::optional<at::Tensor>& skip,
                        const std::optional<at::Tensor>& gradient_scale) override;
  AdamWOptions options_;
};

}  // namespace fsdp
