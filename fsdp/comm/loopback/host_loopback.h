// The host side of a loopback world: every other rank says what this one says.
#pragma once

#include <memory>

#include "fsdp/comm/backend.h"

namespace fsdp {

// A sum is this rank's own value, as if the others had nothing; gathers repeat its share.
[[nodiscard]] std::shared_ptr<CommunicatorBackend> make_host_loopback(int size);

}  // namespace fsdp
