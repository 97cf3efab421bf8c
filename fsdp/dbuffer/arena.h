// One piece of device memory, made once, that buffers take parts of and give back: for memory that must be registered
// with communicators before anything runs, so that it can neither grow nor move.
//
// Where a part lies depends only on the order of the calls, so it is the same on all ranks, as symmetric memory needs.
// A freed part carries the events of those who used it; who takes it next waits for them on its own stream. Host thread
// of the rank only.
#pragma once

#include <c10/core/Allocator.h>

#include <map>
#include <vector>

#include "fsdp/base/types.h"
#include "fsdp/runtime/stream.h"

namespace fsdp {

class Arena {
 public:
  Arena(c10::DataPtr memory, Bytes size);

  // The lowest free part of that size, rounded up to kAlignment, or null. `user` waits for those who had it before.
  [[nodiscard]] void* acquire(Bytes size, const Stream& user);
  [[nodiscard]] bool has_room(Bytes size) const;
  // A part that `acquire` returned, free once `last_use` is reached.
  void release(void* part, const Event& last_use);

  [[nodiscard]] bool contains(const void* address) const;
  [[nodiscard]] void* base() const { return memory_.get(); }
  [[nodiscard]] Bytes size() const { return size_; }
  [[nodiscard]] Bytes in_use() const { return in_use_; }
  [[nodiscard]] Bytes peak() const { return peak_; }

  static constexpr std::int64_t kAlignment = 4096;  // bytes; of window addresses
  [[nodiscard]] static Bytes rounded(Bytes size);

 private:
  struct Free {
    std::int64_t size = 0;
    std::vector<Event> users;
  };
  using FreeList = std::map<std::int64_t, Free>;                           // by offset
  [[nodiscard]] FreeList::const_iterator find(std::int64_t wanted) const;  // the first of neighbours that have room

  c10::DataPtr memory_;
  Bytes size_, in_use_, peak_;
  FreeList free_;
  std::map<std::int64_t, std::int64_t> taken_;  // offset -> size
};

}  // namespace fsdp
