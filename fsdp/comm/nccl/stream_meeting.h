// Ranks of one host that meet on their streams, through flags in memory that they map from each other: no
// multiprocessor is held while one is late.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "fsdp/base/types.h"
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

 private:
  [[nodiscard]] std::uint32_t* flags(int rank, int set) const;
  void meet_in_graph();

  Kernels* kernels_;
  int rank_;
  std::vector<void*> flags_;    // [rank]
  std::uint32_t meetings_ = 0;  // outside of graphs
};

}  // namespace fsdp
