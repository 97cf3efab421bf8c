#include "fsdp/dbuffer/redistribute.h"

#include "fsdp/base/check.h"
#include "fsdp/layout/transition.h"

namespace fsdp {

void gather(const DBuffer& from, const DBuffer& to, const Stream& stream, const char* label) {
  FSDP_INVARIANT(from.dtype() == to.dtype() && &from.layout() == &to.layout());
  PlacementList placements = from.placements();
  ElementRange range = from.range();
  void* source = from.address(range.begin);
  for (const RedistributionStep& step : plan_redistribution(from.placements(), to.placements())) {
    FSDP_INVARIANT(step.transition == Transition::all_gather || step.transition == Transition::slice);
    placements[step.axis] = to.placements()[step.axis];
    const ElementRange next = from.layout().shard(placements, from.mesh().sizes(), from.mesh().coordinates());
    if (step.transition == Transition::all_gather) {
      from.mesh()
          .communicator(step.axis, Use::gather)
          .all_gather(source, to.address(next.begin), Elements(range.length()), from.dtype(), stream, label);
      source = to.address(next.begin);
    } else {
      source =
          static_cast<std::byte*>(source) +
          (source == nullptr ? 0
                             : (next.begin - range.begin) * static_cast<std::int64_t>(c10::elementSize(from.dtype())));
    }
    range = next;
  }
  if (source != to.address(range.begin)) {  // nothing was gathered: a local copy
    from.mesh().mesh().runtime()->copy(to.address(range.begin), source, to.size(), stream);
  }
}

Reduced reduce_in_place(const DBuffer& buffer, const PlacementList& to, const Stream& stream, const char* label,
                        const ReduceRoute& route) {
  PlacementList placements = buffer.placements();
  Reduced result{buffer.range()};
  const auto steps = plan_redistribution(buffer.placements(), to);
  for (std::size_t i = 0; i < steps.size(); ++i) {
    const auto [axis, transition] = std::pair(steps[i].axis, steps[i].transition);
    const Communicator& communicator = buffer.mesh().communicator(axis, Use::reduce);
    void* data = buffer.address(result.range.begin);
    if (transition == Transition::all_reduce) {
      communicator.all_reduce(data, data, Elements(result.range.length()), buffer.dtype(), ReduceOp::sum, stream,
                              label);
      continue;
    }
    FSDP_INVARIANT(transition == Transition::reduce_scatter);
    placements[axis] = Placement::flat;
    result.range = buffer.layout().shard(placements, buffer.mesh().sizes(), buffer.mesh().coordinates());
    const Elements share(result.range.length());
    void* own = buffer.address(result.range.begin);
    PeerInbox* inbox = route.inboxes.empty() ? nullptr : route.inboxes[static_cast<std::size_t>(axis)];
    const Bytes bytes = bytes_of(share, static_cast<std::int64_t>(c10::elementSize(buffer.dtype())));
    if (inbox == nullptr || buffer.dtype() == c10::kDouble || bytes > inbox->largest_share()) {
      communicator.reduce_scatter(data, own, share, buffer.dtype(), stream, label);
      continue;
    }
    result.delivered = route.destination != nullptr && i + 1 == steps.size();
    const SumDestination in_place{.data = own, .dtype = buffer.dtype()};
    communicator.reduce_scatter(data, result.delivered ? *route.destination : in_place, share, buffer.dtype(), *inbox,
                                stream, label);
  }
  return result;
}

int only_gather_axis(const PlacementList& from, const SubMesh& mesh) {
  int found = -1;
  for (std::size_t axis = 0; axis < from.size(); ++axis) {
    if (from[axis] != Placement::flat || mesh.sizes()[axis] == 1) continue;
    if (found >= 0) return -1;
    found = static_cast<int>(axis);
  }
  return found;
}

}  // namespace fsdp
