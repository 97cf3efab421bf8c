#include "fsdp/dbuffer/arena.h"

#include <algorithm>
#include <iterator>

#include "fsdp/base/check.h"

namespace fsdp {
namespace {

// The latest of each stream says it all.
void add_user(std::vector<Event>& users, const Event& event) {
  for (Event& known : users) {
    if (known.stream() != event.stream()) continue;
    if (event.mark() > known.mark()) known = event;
    return;
  }
  users.push_back(event);
}

}  // namespace

Arena::Arena(c10::DataPtr memory, Bytes size) : memory_(std::move(memory)), size_(size) {
  if (size > Bytes(0)) free_[0] = {size.value(), {}};
}

Bytes Arena::rounded(Bytes size) { return Bytes((size.value() + kAlignment - 1) / kAlignment * kAlignment); }

void* Arena::acquire(Bytes size, const Stream& user) {
  const std::int64_t wanted = std::max(rounded(size).value(), kAlignment);
  const auto found =
      std::find_if(free_.begin(), free_.end(), [&](const auto& entry) { return entry.second.size >= wanted; });
  if (found == free_.end()) return nullptr;
  const std::int64_t offset = found->first;
  Free part = std::move(found->second);
  free_.erase(found);
  for (const Event& event : part.users) user.wait(event);
  if (part.size > wanted) free_[offset + wanted] = {part.size - wanted, std::move(part.users)};
  taken_[offset] = wanted;
  in_use_ += Bytes(wanted);
  peak_ = std::max(peak_, in_use_);
  return static_cast<std::byte*>(memory_.get()) + offset;
}

bool Arena::has_room(Bytes size) const {
  const std::int64_t wanted = std::max(rounded(size).value(), kAlignment);
  return std::any_of(free_.begin(), free_.end(), [&](const auto& entry) { return entry.second.size >= wanted; });
}

void Arena::release(void* part, const Event& last_use) {
  std::int64_t offset = static_cast<std::byte*>(part) - static_cast<std::byte*>(memory_.get());
  const auto taken = taken_.find(offset);
  FSDP_INVARIANT(taken != taken_.end());
  Free freed{taken->second, {}};
  if (last_use.recorded()) freed.users.push_back(last_use);
  in_use_ -= Bytes(taken->second);
  taken_.erase(taken);
  const auto merge = [&](std::map<std::int64_t, Free>::iterator neighbour) {
    freed.size += neighbour->second.size;
    for (const Event& event : neighbour->second.users) add_user(freed.users, event);
    free_.erase(neighbour);
  };
  if (const auto after = free_.find(offset + freed.size); after != free_.end()) merge(after);
  if (const auto next = free_.lower_bound(offset); next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second.size == offset) {
      offset = before->first;
      merge(before);
    }
  }
  free_[offset] = std::move(freed);
}

bool Arena::contains(const void* address) const {
  const auto* begin = static_cast<const std::byte*>(memory_.get());
  const auto* at = static_cast<const std::byte*>(address);
  return at >= begin && at < begin + size_.value();
}

}  // namespace fsdp
