// Moves the data of a DBuffer from one placement to another. Both calls enqueue on `stream` and return.
#pragma once

#include "fsdp/dbuffer/dbuffer.h"

namespace fsdp {

// Fills `to` from `from` (same layout and dtype) by the gathers and slices that lead from one placement to the other.
// `from` may be a part of `to`. Uses the gather communicators.
void gather(const DBuffer& from, const DBuffer& to, const Stream& stream, const char* label);

// Sums `buffer` over ranks, in place, until it has the placements `to`; returns the range of packed coordinates that
// then hold this rank's result. The rest of the buffer is left with unspecified values. Uses the reduce communicators.
ElementRange reduce_in_place(const DBuffer& buffer, const PlacementList& to, const Stream& stream, const char* label);

// The one axis, of the mesh's, over which `gather` from these placements to all replicated moves data; -1: none, or
// several.
[[nodiscard]] int only_gather_axis(const PlacementList& from, const SubMesh& mesh);

}  // namespace fsdp
