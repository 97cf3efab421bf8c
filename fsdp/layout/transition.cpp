#include "fsdp/layout/transition.h"

#include "fsdp/base/check.h"

namespace fsdp {

const char* to_string(Transition transition) {
  switch (transition) {
    case Transition::all_gather:
      return "all_gather";
    case Transition::reduce_scatter:
      return "reduce_scatter";
    case Transition::all_reduce:
      return "all_reduce";
    case Transition::slice:
      return "slice";
    case Transition::relabel:
      return "relabel";
  }
  return "?";
}

std::vector<RedistributionStep> plan_redistribution(const PlacementList& from, const PlacementList& to) {
  FSDP_CHECK(from.size() == to.size(), UsageError, "cannot redistribute {} to {}: the numbers of axes differ",
             to_string(from), to_string(to));
  const int axes = static_cast<int>(from.size());
  std::vector<RedistributionStep> splits, all_reduces, relabels, gathers;
  for (int axis = axes - 1; axis >= 0; --axis) {
    if (from[axis] == to[axis]) continue;
    if (to[axis] == Placement::flat) {
      // Splitting now makes this axis the finest split, so no axis left of it may already be flat.
      for (int finer = 0; finer < axis; ++finer) {
        FSDP_CHECK(from[finer] != Placement::flat, UsageError,
                   "cannot redistribute {} to {}: axis {} would be split after the finer axis {}; put it first or "
                   "gather that one",
                   to_string(from), to_string(to), axis, finer);
      }
      splits.push_back({axis, from[axis] == Placement::partial ? Transition::reduce_scatter : Transition::slice});
    } else if (to[axis] == Placement::replicate) {
      if (from[axis] == Placement::partial) all_reduces.push_back({axis, Transition::all_reduce});
    } else {
      FSDP_CHECK(from[axis] == Placement::replicate, UsageError,
                 "cannot redistribute {} to {}: axis {} cannot go from flat to partial", to_string(from), to_string(to),
                 axis);
      relabels.push_back({axis, Transition::relabel});
    }
  }
  for (int axis = 0; axis < axes; ++axis) {
    if (from[axis] != Placement::flat || to[axis] != Placement::replicate) continue;
    for (int finer = 0; finer < axis; ++finer) {
      FSDP_CHECK(to[finer] != Placement::flat, UsageError,
                 "cannot redistribute {} to {}: axis {} cannot be gathered while the finer axis {} stays flat",
                 to_string(from), to_string(to), axis, finer);
    }
    gathers.push_back({axis, Transition::all_gather});
  }
  std::vector<RedistributionStep> steps;
  for (const auto* list : {&splits, &all_reduces, &relabels, &gathers})
    steps.insert(steps.end(), list->begin(), list->end());
  return steps;
}

}  // namespace fsdp
