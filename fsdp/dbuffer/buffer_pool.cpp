#include "fsdp/dbuffer/buffer_pool.h"

#include <algorithm>

#include "fsdp/dbuffer/arena.h"

namespace fsdp {

void BufferPool::count_in(Bytes size) {
  in_use_ += size;
  peak_ = std::max(peak_, in_use_);
  peak_live_ = std::max(peak_live_, ++live_);
}

void BufferPool::adopt_from(BufferPool& other, Bytes size) {
  other.in_use_ -= size;
  other.reserved_ -= size;
  --other.live_;
  reserved_ += size;
  count_in(size);
}

c10::DataPtr BufferPool::acquire(Bytes size, Source source) {
  count_in(size);
  if (arena_ != nullptr && source == Source::arena) {
    if (void* part = arena_->acquire(size, owner_ ? owner_ : runtime_->compute_stream()))
      return {part, runtime_->device()};
    ++misses_;
  }
  auto& unused = free_[size];
  if (!unused.empty()) {
    c10::DataPtr buffer = std::move(unused.back());
    unused.pop_back();
    return buffer;
  }
  reserved_ += size;
  return runtime_->allocate(size, owner_ ? owner_ : runtime_->compute_stream());
}

c10::DataPtr BufferPool::borrow(void* memory, Bytes size) {
  count_in(size);
  return {memory, runtime_->device()};
}

void BufferPool::end_of_loan(Bytes size) {
  in_use_ -= size;
  --live_;
}

void BufferPool::release(c10::DataPtr buffer, Bytes size) {
  in_use_ -= size;
  --live_;
  give_back(std::move(buffer), size);
}

void BufferPool::release_after(c10::DataPtr buffer, Bytes size, const Event& last_use) {
  if (arena_ == nullptr || !arena_->contains(buffer.get())) return release(std::move(buffer), size);
  in_use_ -= size;
  --live_;
  arena_->release(buffer.get(), last_use);
}

void BufferPool::give_back(c10::DataPtr buffer, Bytes size) {
  if (arena_ != nullptr && arena_->contains(buffer.get())) {
    Event last_use;
    (owner_ ? owner_ : runtime_->compute_stream()).record(last_use);
    arena_->release(buffer.get(), last_use);
    return;
  }
  if (runtime_->caches_memory())
    reserved_ -= size;  // freed here
  else
    free_[size].push_back(std::move(buffer));
}

void BufferPool::release_later(c10::DataPtr buffer, Bytes size) {
  in_use_ -= size;
  --live_;
  later_.emplace_back(std::move(buffer), size);
}

void BufferPool::collect() {
  for (auto& [buffer, size] : later_) give_back(std::move(buffer), size);
  later_.clear();
}

void BufferPool::trim() {
  for (auto& [size, buffers] : free_) reserved_ -= size * static_cast<std::int64_t>(buffers.size());
  free_.clear();
}

void BufferPool::reset_peak() {
  peak_ = in_use_;
  peak_live_ = live_;
}

}  // namespace fsdp
