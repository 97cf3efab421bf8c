#include "fsdp/optim/sgd.h"

#include <ATen/ops/_fused_sgd.h>

#include "fsdp/base/check.h"

namespace fsdp {

Sgd::Sgd(FsdpContext& context, const SgdOptions& options, const ParameterOptionsFunction& parameter_options)
    : ShardedOptimizer(context, options.learning_rate,
                       options.momentum != 0 ? std::vector<std::string>{"momentum_buffer"} : std::vector<std::string>{},
                       parameter_options),
      options_(options) {
  FSDP_CHECK(!options.nesterov || options.momentum > 0, UsageError, "SGD: nesterov needs momentum above 0, got {}",
             options.momentum);
}

void Sgd::update(const std::vector<ShardRun*>& runs, const std::vector<at::Tensor>& gradients,
                 const ParameterOptions& options, const std::optional<at::Tensor>& skip) {
  std::vector<at::Tensor> weights, momenta;
  for (ShardRun* run : runs) {
    weights.push_back(run->weight);
    if (!run->state.empty()) momenta.push_back(run->state[0]);
  }
  // The momentum of a first step is its gradient: on zero-filled buffers the later rule gives just that without
  // dampening.
  at::_fused_sgd_(weights, gradients, momenta, options.weight_decay.value_or(options_.weight_decay), options_.momentum,
                  learning_rate() * options.learning_rate_scale, /*dampening=*/0.0, options_.nesterov,
                  /*maximize=*/false,
                  /*is_first_step=*/false, {}, skip);
}

}  // namespace fsdp
