// Moves the data of a DBuffer from one placement to another. Both calls enqueue on `stream` and return.
#pragma once

#include <span>

#include "fsdp/comm/peer_inbox.h"
#include "fsdp/dbuffer/dbuffer.h"

namespace fsdp {

// Fills `to` from `from` (same layout and dtype) by the gathers and slices that lead from one placement to the other.
// `from` may be a part of `to`. Uses the gather communicators.
void gather(const DBuffer& from, const DBuffer& to, const Stream& stream, const char* label);

// Which way a reduction goes where there is a choice, and where its result is wanted.
struct ReduceRoute {
  std::span<PeerInbox* const> inboxes = {};     // [axis] for reduce-scatters over it; null: the communicator's own way
  const SumDestination* destination = nullptr;  // of this rank's whole result; null: in place
};

struct Reduced {
  ElementRange range;  // of packed coordinates: this rank's result
  // It is at the route's destination, and not in the buffer: a reduce-scatter through an inbox came last.
  bool delivered = false;
};

// Sums `buffer` over ranks, in place, until it has the placements `to`. The rest of the buffer is left with unspecified
// values. Uses the reduce communicators.
Reduced reduce_in_place(const DBuffer& buffer, const PlacementList& to, const Stream& stream, const char* label,
                        const ReduceRoute& route = {});

// The one axis, of the mesh's, over which `gather` from these placements to all replicated moves data; -1: none, or
// several.
[[nodiscard]] int only_gather_axis(const PlacementList& from, const SubMesh& mesh);

}  // namespace fsdp
