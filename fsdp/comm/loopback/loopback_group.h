// The device side of loopback_options.h; in the module libfsdp_cuda.so.
#pragma once

#include <memory>

#include "fsdp/comm/backend.h"
#include "fsdp/comm/loopback/loopback_options.h"
#include "fsdp/runtime/runtime.h"

namespace fsdp {

[[nodiscard]] std::shared_ptr<CommunicatorBackend> make_loopback_group(const std::shared_ptr<Runtime>& runtime,
                                                                       const LoopbackOptions& options, GroupUse use);

}  // namespace fsdp
