// Ranks of one host that meet on their streams, through flags in memory that they map from each other: no
// multiprocessor is held while one is late.
//
// CUDA does not know of such waits. Streams may share a queue of the device, so whatever the host enqueues later, on
// any stream, may come after a wait; that closes no circle as long as all ranks enqueue what they do together in the
// same order, and nothing that a peer's meeting depends on after the own one.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/base/types.h"
#include "fsdp/comm/nccl/peer_mapping.h"
#include "fsdp/runtime/kernels.h"

namespace fsdp {

class StreamMeeting {
 public:
  // Of flags, on every rank. Zero at first.
  static constexpr Bytes kFlags{3 * 128};

  // `flags`: [rank] where those of that rank are mapped; `kernels` outlives it.
  StreamMeeting(Kernels& kernels, int rank, std::vector<void*> flags)
      : kernels_(&kernels), rank_(rank), flags_(std::move(flags)) {}

  // What was on the others' streams before they came is done, and seen by what comes after on this one. All meetings of
  // one object are on one stream, or ordered; graphs that are replayed count apart.
  void meet(cudaStream_t stream);

  // A first meeting, that the host waits for. Collective; false, on all ranks, when one could not come.
  [[nodiscard]] bool rehearse(const PeerGroup& group, std::string& why);

 private:
  [[nodiscard]] std::uint32_t* flags(int rank, int set) const;
  void meet_in_graph();

  Kernels* kernels_;
  int rank_;
  std::vector<void*> flags_;    // [rank]
  std::uint32_t meetings_ = 0;  // outside of graphs
};

}  // namespace fsdp
