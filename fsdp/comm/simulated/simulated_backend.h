// Collectives that cost modelled time on the virtual clock and move no data: rank 0 of any number of equal ranks.
#pragma once

#include <memory>

#include "fsdp/comm/backend.h"
#include "fsdp/runtime/simulated/simulated_runtime.h"

namespace fsdp {

[[nodiscard]] std::shared_ptr<CommunicatorBackend> make_simulated_backend(std::shared_ptr<SimulatedRuntime> runtime,
                                                                          int size);

}  // namespace fsdp
