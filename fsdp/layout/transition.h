// Which operation takes a buffer from one placement to another, one mesh axis at a time.
//
//   flat      -> replicate  all-gather          partial -> replicate  all-reduce
//   partial   -> flat       reduce-scatter      replicate -> flat     local slice
//   replicate -> partial    relabel (the caller decides which rank keeps the value)
//
// Flat axes split the range one inside the other (layout/global_layout.h), so pieces are contiguous only if an axis is
// gathered after, and scattered before, every axis left of it that is or becomes flat.
#pragma once

#include <cstdint>
#include <vector>

#include "fsdp/layout/placement.h"

namespace fsdp {

enum class Transition : std::uint8_t { all_gather, reduce_scatter, all_reduce, slice, relabel };

[[nodiscard]] const char* to_string(Transition transition);

struct RedistributionStep {
  int axis = 0;
  Transition transition = Transition::all_gather;
  bool operator==(const RedistributionStep&) const = default;
};

// The steps in the order in which they must run; empty when nothing changes. Splitting steps come first, all-reduces
// (then on the smaller data) next, gathers last. Throws UsageError for changes that no sequence of contiguous pieces
// can make (flat -> partial, or one flat axis gathered under another that stays flat).
[[nodiscard]] std::vector<RedistributionStep> plan_redistribution(const PlacementList& from, const PlacementList& to);

}  // namespace fsdp
