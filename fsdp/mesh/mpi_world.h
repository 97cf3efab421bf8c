// Ranks that are processes of one MPI job, on one machine or several, on the CPU.
#pragma once

#include <optional>

#include "fsdp/mesh/world.h"

namespace fsdp {

// A world of the first `size` processes of the job (0: all). Every process of the job makes the same calls in the same
// order; one beyond `size` gets none. Throws UsageError when MPI is not there or the job has fewer processes,
// CommunicationError when the others do not start within the deadline.
[[nodiscard]] std::optional<World> mpi_world(const WorldOptions& options = {}, int size = 0);

}  // namespace fsdp
