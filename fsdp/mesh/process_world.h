// Ranks that are processes, on one machine or several.
#pragma once

#include <optional>

#include "fsdp/mesh/launcher.h"
#include "fsdp/mesh/world.h"

namespace fsdp {

// A world of the first `size` processes of the job that `launcher` has started (0: all): over MPI for mpirun and srun,
// over ZeroMQ for torchrun; on CUDA these carry what the hosts say to each other, and NCCL the rest. Every process of
// the job makes the same calls in the same order; one beyond `size` gets none. Throws UsageError when the library for
// it is not there, or sees another job than the launcher's variables say; CommunicationError when the others do not
// join within the deadline.
[[nodiscard]] std::optional<World> process_world(const Launcher& launcher, const WorldOptions& options = {},
                                                 int size = 0);

}  // namespace fsdp
