// How the processes of a torchrun, or of anyone who sets the same variables, find each other: by the key-value store at
// MASTER_ADDR:MASTER_PORT, as PyTorch's "env://" does.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "fsdp/comm/processes/transport.h"

namespace fsdp::processes {

struct RendezvousOptions {
  int rank = 0, size = 1;
  std::chrono::milliseconds deadline{};
};

// torchrun runs the store itself (TORCHELASTIC_USE_AGENT_STORE); otherwise rank 0 does, as long as the result lives.
// Throws UsageError when MASTER_ADDR or MASTER_PORT is missing or wrong; the exchange throws CommunicationError when a
// process does not come within the deadline, and names it.
[[nodiscard]] Bootstrap make_rendezvous(const RendezvousOptions& options);

// The address of this machine on the way to `host`. Throws UsageError when the name is not known.
[[nodiscard]] std::string own_address_towards(const std::string& host);

}  // namespace fsdp::processes
