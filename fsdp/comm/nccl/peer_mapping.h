// Pieces of device memory that the processes of one host map from each other.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/comm/nccl/descriptor_exchange.h"
#include "fsdp/comm/nccl/mapped_memory.h"

namespace fsdp {

// The ranks that share memory, and how their hosts talk.
struct PeerGroup {
  int rank = 0, size = 1;
  HostAllGather all_gather;
  std::function<bool(bool good)> all_agree;  // whether `good` holds on all ranks
  std::chrono::milliseconds deadline{};
};

// Does work that may fail on some ranks. Returns whether none threw, the same on all, so that nobody goes on to wait
// for one that has failed; `why` says what this rank's was. Collective.
[[nodiscard]] bool all_manage(const PeerGroup& group, std::string& why, const std::function<void()>& work);

using PeerRanges = std::vector<std::vector<std::unique_ptr<MappedRange>>>;  // [rank][piece]; this rank's are null

// Ranges that show every rank's pieces, of which each has as many, of the same sizes. Collective, blocks the host.
// False, on all ranks, when one could not.
[[nodiscard]] bool map_pieces(const std::vector<std::shared_ptr<MemoryPiece>>& own, const PeerGroup& group,
                              PeerRanges& ranges, std::string& why);

}  // namespace fsdp
