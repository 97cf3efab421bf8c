// Mean loss over the targets of held-out text, split over the ranks. Collective: all ranks call it and get the same
// value, which depends on the number of ranks only by rounding.
#pragma once

#include "apps/fsdp/agreement.h"
#include "apps/fsdp/train_config.h"
#include "apps/fsdp/trained_model.h"
#include "fsdp/data/token_dataset.h"

#include <optional>

namespace fsdp::app {

// Nothing when the user interrupts it.
[[nodiscard]] std::optional<double> validation_loss(TrainedModel& model, const data::TokenDataset& data,
                                                    const RunConfig& run, const World& world,
                                                    const Agreement& agreement);

}  // namespace fsdp::app
