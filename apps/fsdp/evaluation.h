// Mean loss on held-out text, split over the ranks. Collective: all ranks call it and get the same value, which depends
// on the number of ranks only by rounding.
#pragma once

#include "apps/fsdp/agreement.h"
#include "apps/fsdp/text_dataset.h"
#include "apps/fsdp/train_config.h"
#include "models/transformer.h"

namespace fsdp::app {

[[nodiscard]] double validation_loss(models::Transformer& model, const TextDataset& data, const RunConfig& run,
                                     const World& world, const Agreement& agreement);

}  // namespace fsdp::app
