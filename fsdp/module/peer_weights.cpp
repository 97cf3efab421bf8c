// The part of Scheduler for units whose gathers read the other ranks' shares where they rest (comm/peer_memory.h).
//
// Such a gather waits for nobody, so ranks meet twice a step on the gather stream instead: before the first read of new
// weights, for all must have written theirs, and after the last read, for nobody may write while another still reads.
// Both follow from the calls made, so they are the same on all ranks. Between the two, ranks may drift apart.
#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <map>
#include <utility>

#include "fsdp/base/log.h"
#include "fsdp/dbuffer/redistribute.h"
#include "fsdp/module/scheduler.h"

namespace fsdp {

void Scheduler::make_peer_memory() {
  if (!options_.one_sided_gathers || runtime().kernels() == nullptr || mesh_.world().size() == 1) return;
  struct Readers {
    std::vector<PeerPart> parts;
    std::vector<FsdpParameterGroup*> groups;
  };
  std::map<int, Readers> by_axis;  // of the mesh
  Bytes budget = options_.keep_budget.value_or(Bytes(0));
  for (const auto& unit : units_) {
    const bool stays = stays_gathered(*unit);
    for (const auto& group : unit->groups()) {
      const int axis = group->releasable() ? only_gather_axis(group->strategy().parameter, group->mesh()) : -1;
      if (axis < 0) continue;
      const Bytes granularity = group->mesh().communicator(axis, Use::gather).backend()->peer_granularity();
      const Bytes share = group->resting_bytes();
      if (granularity == Bytes(0) || share < FsdpParameterGroup::least_peer_share() ||
          share.value() % granularity.value() != 0)
        continue;
      PeerPart part{.share = share, .places = options_.prefetch.units_at_once(), .kept = stays ? 1 : 0};
      if (unit->options().reshard == Reshard::by_budget && group->whole_bytes() <= budget) {
        part.kept = 1;
        budget -= group->whole_bytes();
      }
      Readers& readers = by_axis[group->mesh().axes()[axis]];
      readers.parts.push_back(part);
      readers.groups.push_back(group.get());
    }
  }
  for (const auto& [axis, readers] : by_axis) {
    std::string why;
    const Communicator& communicator = mesh_.communicator(axis, Use::gather);
    auto memory = communicator.backend()->make_peer_memory(readers.parts, *runtime().kernels(), why);
    if (memory == nullptr) {
      log::write(log::Level::warning,
                 fmt::format("fsdp: rank {}: gathers do not read other ranks' memory{}{}", mesh_.world().rank().value(),
                             why.empty() ? ": another rank could not share it" : ": ", why));
      continue;
    }
    for (std::size_t i = 0; i < readers.groups.size(); ++i)
      readers.groups[i]->use_peers(memory.get(), static_cast<int>(i));
    peers_.push_back({std::move(memory), communicator});
  }
  compute_stream().synchronize();
}

void Scheduler::publish_weights() {
  settle_reads();
  for (auto& unit : units_) {
    for (auto& group : unit->groups()) {
      if (group->reads_peers()) group->refresh(epoch_, gather_stream_, unit->names_.unshard);
    }
  }
  for (const Peers& peers : peers_)
    peers.communicator.barrier(*peers.memory, gather_stream_, "FSDP:weights are written");
  published_epoch_ = epoch_;
}

void Scheduler::settle_reads() {
  if (!std::exchange(unsettled_reads_, false)) return;
  for (const Peers& peers : peers_) peers.communicator.barrier(*peers.memory, gather_stream_, "FSDP:weights were read");
}

void Scheduler::join_reads() {
  // After an exception peers may not come.
  if (unsettled_reads_ && std::uncaught_exceptions() == 0) join_gathers();
}

}  // namespace fsdp
