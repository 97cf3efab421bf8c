#include "apps/fsdp/evaluation.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_local_scalar_dense.h>

#include <algorithm>
#include <utility>

#include "apps/fsdp/batch_tensors.h"
#include "apps/fsdp/interrupt.h"

namespace fsdp::app {

std::optional<double> validation_loss(TrainedModel& model, const data::TokenDataset& data, const RunConfig& run,
                                      const World& world, const Agreement& agreement) {
  at::NoGradGuard no_grad;
  const auto total = run.eval_batches * run.batch;
  const auto share = total / world.size();  // the batch divides by the ranks
  const auto at_once = run.batch / (world.size() * run.microbatches);
  const auto first = world.rank().value() * share;
  double sum = 0, targets = 0;
  for (std::int64_t i = 0; i < share; i += at_once) {
    auto batch = data.validation_batch(first + i, at_once, total);
    targets += static_cast<double>(batch.targets.size() - std::ranges::count(batch.targets, data::kIgnoredTarget));
    const auto tensors = to_tensors(std::move(batch), world.runtime()->device());
    sum += model.loss_sum(tensors).item<double>();
    if (agreement.sum({interrupted() ? 1.0 : 0.0})[0] > 0) return std::nullopt;
  }
  const auto sums = agreement.sum({sum, targets});
  return sums[0] / std::max(1.0, sums[1]);
}

}  // namespace fsdp::app
