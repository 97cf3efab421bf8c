// Ranks that are processes with a GPU each: NCCL between the devices, messages between the hosts.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "fsdp/mesh/launcher.h"
#include "fsdp/mesh/world.h"

namespace fsdp {

// Throws UsageError when CUDA is asked for and not there, with the reason.
[[nodiscard]] bool uses_cuda(DeviceKind kind);

// The same for the ranks of a job: those with CUDA wait for each other, so that ranks without are named as missing.
[[nodiscard]] bool all_use_cuda(const std::shared_ptr<World::Backend>& host, DeviceKind kind);

// Over `host`, the same ranks on the CPU. `peer_failure`: why another rank has failed; empty while none has; any
// thread.
[[nodiscard]] World cuda_world(std::shared_ptr<World::Backend> host, const Launcher& launcher,
                               const std::function<std::string()>& peer_failure, std::chrono::milliseconds deadline);

}  // namespace fsdp
