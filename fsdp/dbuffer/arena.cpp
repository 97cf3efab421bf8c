#include "fsdp/dbuffer/arena.h"

#include <algorithm>

#include "fsdp/base/check.h"

namespace fsdp {
Arena::Arena(c10::DataPtr memory, Bytes size) : memory_(std::move(memory)), size_(size) {
  if (size > Bytes(0)) free_[0] = {size.value(), {}};
}

Bytes Arena::rounded(Bytes size) { return Bytes((size.value() + kAlignment - 1) / kAlignment * kAlignment); }

// Parts that lie side by side serve as one, but keep their own users: a part that is used again must not wait for what
// happens beside it. So they are not merged.
Arena::FreeList::const_iterator Arena::find(std::int64_t wanted) const {
  auto first = free_.begin();
  std::int64_t length = 0;
  for (auto at = free_.begin(); at != free_.end(); ++at) {
    if (at->first != first->first + length) {
      first = at;
      length = 0;
    }
    length += at->second.size;
    if (length >= wanted) return first;
  }
  return free_.end();
}

void* Arena::acquire(Bytes size, const Stream& user) {
  const std::int64_t wanted = std::max(rounded(size).value(), kAlignment);
  auto part = find(wanted);
  if (part == free_.end()) return nullptr;
  const std::int64_t offset = part->first;
  for (std::int64_t got = 0; got < wanted;) {
    Free free = part->second;
    part = free_.erase(part);
    for (const Event& event : free.users) user.wait(event);
    got += free.size;
    if (got > wanted) free_[offset + wanted] = {got - wanted, std::move(free.users)};
  }
  taken_[offset] = wanted;
  in_use_ += Bytes(wanted);
  peak_ = std::max(peak_, in_use_);
  return static_cast<std::byte*>(memory_.get()) + offset;
}

bool Arena::has_room(Bytes size) const { return find(std::max(rounded(size).value(), kAlignment)) != free_.end(); }

void Arena::release(void* part, const Event& last_use) {
  const std::int64_t offset = static_cast<std::byte*>(part) - static_cast<std::byte*>(memory_.get());
  const auto taken = taken_.find(offset);
  FSDP_INVARIANT(taken != taken_.end());
  in_use_ -= Bytes(taken->second);
  free_[offset] = {taken->second, {}};
  if (last_use.recorded()) free_[offset].users.push_back(last_use);
  taken_.erase(taken);
}

bool Arena::contains(const void* address) const {
  const auto* begin = static_cast<const std::byte*>(memory_.get());
  const auto* at = static_cast<const std::byte*>(address);
  return at >= begin && at < begin + size_.value();
}

}  // namespace fsdp
