// Memory for buffers that come and go on one stream, such as gathered weights.
//
// Buffers of the same size are reused in stream order: whoever takes one must use it first on the stream on which its
// last user was released. Where the device's allocator keeps freed memory itself, buffers go back to it at once. Host
// thread of the rank only.
#pragma once

#include <c10/core/Allocator.h>

#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "fsdp/runtime/runtime.h"

namespace fsdp {

class Arena;

class BufferPool {
 public:
  // `owner`: the stream on which buffers are used and released; none: whatever computes.
  explicit BufferPool(std::shared_ptr<Runtime> runtime, Stream owner = {})
      : runtime_(std::move(runtime)), owner_(std::move(owner)) {}

  enum class Source : std::uint8_t { arena, allocator };  // arena: if there is one and it has room
  [[nodiscard]] c10::DataPtr acquire(Bytes size, Source source = Source::arena);
  void release(c10::DataPtr buffer, Bytes size);
  // Buffers come from `arena` while it has room, else as usual; `misses` counts those.
  void use_arena(Arena* arena) { arena_ = arena; }
  [[nodiscard]] std::int64_t misses() const { return misses_; }
  // The buffer's last user ended with this event, and not with what the owner does now.
  void release_after(c10::DataPtr buffer, Bytes size, const Event& last_use);
  // As release, but another stream than the owner may still use it: it is kept until `collect`.
  void release_later(c10::DataPtr buffer, Bytes size);
  void collect();  // the owner has waited for all others
  // Memory of another's, used as if it came from here: counted, and not kept.
  [[nodiscard]] c10::DataPtr borrow(void* memory, Bytes size);
  void end_of_loan(Bytes size);
  // Moves a buffer in use from another pool's books to this one's.
  void adopt_from(BufferPool& other, Bytes size);
  void trim();  // gives unused memory back; the caller makes sure that no stream still touches it

  [[nodiscard]] Bytes in_use() const { return in_use_; }
  [[nodiscard]] Bytes peak() const { return peak_; }
  [[nodiscard]] Bytes reserved() const { return reserved_; }
  [[nodiscard]] int live() const { return live_; }
  [[nodiscard]] int peak_live() const { return peak_live_; }
  void reset_peak();

 private:
  void count_in(Bytes size);
  void give_back(c10::DataPtr buffer, Bytes size);

  std::shared_ptr<Runtime> runtime_;
  Stream owner_;
  Arena* arena_ = nullptr;
  std::int64_t misses_ = 0;
  std::vector<std::pair<c10::DataPtr, Bytes>> later_;
  std::map<Bytes, std::vector<c10::DataPtr>> free_;
  Bytes in_use_, peak_, reserved_;
  int live_ = 0, peak_live_ = 0;
};

}  // namespace fsdp
