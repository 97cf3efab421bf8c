#include "fsdp/optim/adamw.h"

#include <ATen/ops/_fused_adamw.h>

#include "fsdp/base/check.h"

namespace fsdp {

AdamW::AdamW(FsdpContext& context, const AdamWOptions& options, const ParameterOptionsFunction& parameter_options)
    : ShardedOptimizer(context, options.learning_rate, /*state_count=*/2, parameter_options), options_(options) {
  FSDP_CHECK(options.beta1 >= 0 && options.beta1 < 1 && options.beta2 >= 0 && options.beta2 < 1, UsageError,
             "AdamW: betas are {} and {}, expected 0 <= beta < 1", options.beta1, options.beta2);
  FSDP_CHECK(options.epsilon > 0, UsageError, "AdamW: epsilon is {}, expected more than 0", options.epsilon);
}

void AdamW::update(const std::vector<ShardRun*>& runs, const std::vector<at::Tensor>& gradients,
                   const ParameterOptions& options, const std::optional<at::Tensor>& skip) {
  std::vector<at::Tensor> weights, first, second, steps;
  for (ShardRun* run : runs) {
    weights.push_back(run->weight);
    first.push_back(run->state[0]);
    second.push_back(run->state[1]);
    run->step.add_(1);
    if (skip) run->step.sub_(*skip);
    steps.push_back(run->step);
  }
  at::_fused_adamw_(weights, gradients, first, second, {}, steps, learning_rate() * options.learning_rate_scale,
                    options_.beta1, options_.beta2, options.weight_decay.value_or(options_.weight_decay),
                    options_.epsilon, /*amsgrad=*/false, /*maximize=*/false, {}, skip);
}

}  // namespace fsdp
