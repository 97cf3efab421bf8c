#include "fsdp/optim/adamw.h"

#include <ATen/ops/_fused_adamw.h>

#include "fsdp/base/check.h"
#include "fsdp/runtime/kernels.h"

namespace fsdp {

AdamW::AdamW(FsdpContext& context, const AdamWOptions& options, const ParameterOptionsFunction& parameter_options)
    : ShardedOptimizer(context, options.learning_rate, {"exp_avg", "exp_avg_sq"}, parameter_options,
                       /*own_kernel=*/true),
      options_(options) {
  FSDP_CHECK(options.beta1 >= 0 && options.beta1 < 1 && options.beta2 >= 0 && options.beta2 < 1, UsageError,
             "AdamW: betas are {} and {}, expected 0 <= beta < 1", options.beta1, options.beta2);
  FSDP_CHECK(options.epsilon > 0, UsageError, "AdamW: epsilon is {}, expected more than 0", options.epsilon);
}

void AdamW::update_on_device(const std::vector<DeviceRun>& runs, const at::Tensor& learning_rate,
                             const std::optional<at::Tensor>& skip, const std::optional<at::Tensor>& gradient_scale) {
  std::vector<AdamWPiece> pieces;
  pieces.reserve(runs.size());
  for (const DeviceRun& r : runs) {
    const ShardRun& run = *r.run;
    const auto& dtypes = run.group->dtypes();
    pieces.push_back({.weight = run.weight.mutable_data_ptr(),
                      .first_moment = run.state[0].mutable_data_ptr(),
                      .second_moment = run.state[1].mutable_data_ptr(),
                      .step = static_cast<float*>(run.step.mutable_data_ptr()),
                      .gradient = r.gradient,
                      .low_precision = r.low_precision,
                      .count = run.range.length(),
                      .learning_rate_scale = static_cast<float>(run.options.learning_rate_scale),
                      .weight_decay = static_cast<float>(run.options.weight_decay.value_or(options_.weight_decay)),
                      .weight_dtype = dtypes.main,
                      .gradient_dtype = dtypes.gradient,
                      .low_precision_dtype = r.low_precision == nullptr ? dtypes.main : dtypes.compute});
  }
  kernels()->adamw(
      pieces, {.learning_rate = static_cast<const float*>(learning_rate.const_data_ptr()),
               .skip = skip ? static_cast<const float*>(skip->const_data_ptr()) : nullptr,
               .gradient_scale = gradient_scale ? static_cast<const float*>(gradient_scale->const_data_ptr()) : nullptr,
               .heed_marks = pieces.empty() ? false : runs.front().run->group->mesh().mesh().runtime()->capturing(),
               .beta1 = options_.beta1,
               .beta2 = options_.beta2,
               .epsilon = options_.epsilon});
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
