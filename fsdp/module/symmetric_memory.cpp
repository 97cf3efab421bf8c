// The part of Scheduler that puts what moves between GPUs of one host into one registered arena.
//
// The arena holds the resting shards that gathers send, and behind them room for gathered units and reduce slots, which
// take turns in it: a gather that finds no room takes that of a reduction under way, and waits for it on its own
// stream. What does not fit comes from the caching allocator and goes NCCL's usual way; all ranks decide alike, for the
// order of requests is the same everywhere.
#include <fmt/format.h>

#include <algorithm>

#include "fsdp/base/check.h"
#include "fsdp/dbuffer/redistribute.h"
#include "fsdp/module/scheduler.h"
#include "fsdp/runtime/kernels.h"

namespace fsdp {
namespace {

// Whether `good` holds on all ranks of the axis.
bool all_agree(const DeviceMesh& mesh, int axis, bool good) {
  const Communicator& hosts = mesh.communicator(axis, Use::host);
  if (!hosts) return false;
  std::int64_t bad = good ? 0 : 1;
  const Stream stream = mesh.world().host().runtime()->compute_stream();
  hosts.all_reduce(&bad, &bad, Elements(1), c10::kLong, ReduceOp::max, stream, "FSDP:agreement on memory");
  stream.synchronize();
  return bad == 0;
}

}  // namespace

// Between its uses in a step.
bool Scheduler::stays_gathered(const FsdpModule& unit) const {
  const bool root = std::find(tree_.roots.begin(), tree_.roots.end(), unit.index()) != tree_.roots.end();
  return unit.options().reshard == Reshard::never || (root && unit.options().reshard == Reshard::automatic);
}

void Scheduler::make_arena() {
  if (runtime().kernels() == nullptr || mesh_.world().size() == 1) return;
  constexpr const char* kCopies = "copies to peers, summed by one kernel";
  int axis = -1;
  std::vector<FsdpParameterGroup*> groups;  // whose weights are gathered over it
  for (const auto& unit : units_) {
    for (const auto& group : unit->groups()) {
      const int one = group->releasable() ? only_gather_axis(group->strategy().parameter, group->mesh()) : -1;
      const int own = one < 0 ? -1 : group->mesh().axes()[one];
      if (own < 0 || (axis >= 0 && own != axis)) continue;
      axis = own;
      groups.push_back(group.get());
    }
  }
  if (groups.empty()) {
    if (!inboxes_.empty()) memory_path_ = fmt::format("reductions: {}", kCopies);
    return;
  }
  const auto gather = mesh_.communicator(axis, Use::gather).backend(),
             reduce = mesh_.communicator(axis, Use::reduce).backend();
  const bool copies = inboxes_.contains(axis);
  const auto reading = std::count_if(groups.begin(), groups.end(), [](const auto* g) { return g->reads_peers(); });
  const bool all_read = static_cast<std::size_t>(reading) == groups.size();
  const auto describe = [&](const std::string& other_gathers, const std::string& other_reductions) {
    std::string gathers = all_read ? "" : other_gathers;
    if (reading > 0)
      gathers =
          fmt::format("reads of peers for {} of {} groups{}{}", reading, groups.size(), all_read ? "" : ", ", gathers);
    memory_path_ = fmt::format("gathers: {}, reductions: {}", gathers, copies ? kCopies : other_reductions);
  };
  if (all_read && copies) return describe({}, {});
  if (!options_.symmetric_memory) return describe("ring", "ring");
  std::string refusal = gather->why_no_symmetric_memory();
  if (refusal.empty()) refusal = reduce->why_no_symmetric_memory();
  if (!refusal.empty()) {
    const std::string ring = fmt::format("ring (no symmetric memory, for {})", refusal);
    return describe(ring, ring);
  }

  Bytes shards, largest, largest_slot, kept;
  for (const FsdpParameterGroup* group : groups) {
    if (!group->reads_peers()) shards += Arena::rounded(group->resting_bytes());
  }
  for (const auto& unit : units_) {
    Bytes whole, slot;
    for (const auto& group : unit->groups()) {
      if (group->releasable() && !group->reads_peers()) whole += Arena::rounded(group->whole_bytes());
      if (!copies) slot += Arena::rounded(group->slot_bytes());
    }
    if (stays_gathered(*unit)) {
      kept += whole;  // beside the others
    } else {
      largest = std::max(largest, whole);
      largest_slot = std::max(largest_slot, slot);
    }
  }
  if (options_.keep_budget && largest > Bytes(0)) kept += *options_.keep_budget;
  const Bytes room =
      options_.symmetric_bytes.value_or(kept + largest * options_.prefetch.units_at_once() + largest_slot * 2);
  const Bytes size = shards + Arena::rounded(room);

  c10::DataPtr memory = gather->allocate_symmetric(size);
  bool good = all_agree(mesh_, axis, memory.get() != nullptr);
  if (good) good = all_agree(mesh_, axis, gather->register_symmetric(memory.get(), size));
  if (good && !copies) good = all_agree(mesh_, axis, reduce->register_symmetric(memory.get(), size));
  if (!good) {
    for (const auto& group : {gather, reduce}) group->deregister_symmetric(memory.get());
    const std::string ring = "ring (NCCL could not register memory on every rank)";
    return describe(ring, ring);
  }
  arena_groups_ = {gather};
  if (!copies) arena_groups_.push_back(reduce);
  arena_resting_ = shards;
  arena_ = std::make_unique<Arena>(std::move(memory), size);
  const Stream compute = compute_stream();
  for (FsdpParameterGroup* group : groups) {
    if (group->reads_peers()) continue;
    void* part = arena_->acquire(group->resting_bytes(), compute);
    FSDP_INVARIANT(part != nullptr);
    group->move_model_weight(part);
  }
  compute.synchronize();  // nobody gathers from a peer's memory before it is filled
  static_cast<void>(all_agree(mesh_, axis, true));
  gather_pool_.use_arena(arena_.get());
  if (!copies) slot_pool_.use_arena(arena_.get());
  describe(gather->path(), reduce->path());
  memory_path_ += fmt::format(", with an arena of {} MiB", size.value() >> 20);
}

// Slots whose reduction is under way: their memory may be taken by whoever waits for it. What does not lie in the arena
// stays until compute has waited.
void Scheduler::reclaim_slots() {
  for (auto& slot : slots_) {
    if (slot.in_use) continue;
    std::erase_if(slot.memory, [&](auto& part) {
      if (!arena_->contains(part.first.get())) return false;
      slot_pool_.release_after(std::move(part.first), part.second, slot.done);
      return true;
    });
  }
}

}  // namespace fsdp
