// File descriptors passed between processes of one host, over UNIX sockets: how CUDA lets a process map another's
// memory.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <vector>

namespace fsdp {

// receive[rank * bytes ...] = send of that rank, in host memory, for all ranks of a group.
using HostAllGather = std::function<void(const void* send, void* receive, std::size_t bytes)>;

// [rank][index] descriptors of all ranks, as many from each; those of other ranks are the caller's to close, its own
// place stays empty. Collective. Throws CommunicationError when they do not come within the deadline, or the ranks
// cannot reach each other so (containers of their own).
[[nodiscard]] std::vector<std::vector<int>> exchange_descriptors(const std::vector<int>& own, int rank, int size,
                                                                 const HostAllGather& all_gather,
                                                                 std::chrono::milliseconds deadline);

}  // namespace fsdp
