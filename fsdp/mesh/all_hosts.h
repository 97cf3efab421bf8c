// The group of all ranks of a world, exchanging host memory: for what they must agree on.
#pragma once

#include <string>

#include "fsdp/comm/communicator.h"
#include "fsdp/mesh/world.h"

namespace fsdp {

// Collective. `name` is for messages.
[[nodiscard]] Communicator all_hosts(const World& world, const std::string& name);

}  // namespace fsdp
