// The part of Scheduler that gives groups the memory through which they are reduced by copies (comm/peer_inbox.h): one
// inbox an axis of the mesh, as large as the largest share that is reduced over it. Made before the arena, for what
// goes through an inbox needs no registered slots.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <utility>

#include "fsdp/base/log.h"
#include "fsdp/module/scheduler.h"
#include "fsdp/runtime/kernels.h"

namespace fsdp {

void Scheduler::make_inboxes() {
  if (options_.reducer != Reducer::copy_engine || runtime().kernels() == nullptr) return;
  std::map<int, Bytes> largest_share;  // by axis of the mesh
  for (const auto& unit : units_) {
    for (const auto& group : unit->groups()) {
      const SubMesh& mesh = group->mesh();
      if (!group->trainable() || group->dtypes().reduce == c10::kDouble) continue;
      std::int64_t size = group->slot_bytes().value();
      for (std::size_t axis = mesh.sizes().size(); axis-- > 0;) {  // inner axes are scattered first
        if (mesh.sizes()[axis] == 1 || group->strategy().optimizer[axis] != Placement::flat) continue;
        size /= mesh.sizes()[axis];
        Bytes& share = largest_share[mesh.axes()[axis]];
        share = std::max(share, Bytes(size));
      }
    }
  }
  for (const auto& [axis, share] : largest_share) {
    std::string why;
    auto inbox = mesh_.communicator(axis, Use::reduce).backend()->make_inbox(share, *runtime().kernels(), why);
    if (inbox != nullptr)
      inboxes_[axis] = std::move(inbox);
    else if (!why.empty())
      log::write(log::Level::warning, fmt::format("fsdp: rank {}: reductions are not made of copies to other ranks, on "
                                                  "any rank: {}",
                                                  mesh_.world().rank().value(), why));
  }
  if (inboxes_.empty()) return;
  for (const auto& unit : units_) {
    for (const auto& group : unit->groups()) {
      std::vector<PeerInbox*> of_group;
      for (const int axis : group->mesh().axes()) {
        const auto found = inboxes_.find(axis);
        of_group.push_back(found == inboxes_.end() ? nullptr : found->second.get());
      }
      group->use_inboxes(std::move(of_group));
    }
  }
}

}  // namespace fsdp
