#include "apps/fsdp/evaluation.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_local_scalar_dense.h>

#include "fsdp/module/call.h"

namespace fsdp::app {

double validation_loss(models::Transformer& model, const TextDataset& data, const RunConfig& run, const World& world,
                       const Agreement& agreement) {
  at::NoGradGuard no_grad;
  const auto total = run.eval_batches * run.batch;
  const auto share = total / world.size();  // the batch divides by the ranks
  const auto at_once = run.batch / (world.size() * run.microbatches);
  const auto first = world.rank().value() * share;
  double sum = 0;
  for (std::int64_t i = 0; i < share; i += at_once) {
    const auto batch = data.validation_batch(first + i, at_once, total);
    sum += call(model, &models::TransformerImpl::loss, batch.tokens, batch.targets).item<double>() *
           static_cast<double>(at_once);
  }
  return agreement.sum({sum})[0] / static_cast<double>(total);
}

}  // namespace fsdp::app
