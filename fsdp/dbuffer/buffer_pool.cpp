#include "fsdp/dbuffer/buffer_pool.h"

#include <algorithm>

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

c10::DataPtr BufferPool::acquire(Bytes size) {
  count_in(size);
  auto& unused = free_[size];
  if (!unused.empty()) {
    c10::DataPtr buffer = std::move(unused.back());
    unused.pop_back();
    return buffer;
  }
  reserved_ += size;
  return runtime_->allocate(size);
}

void BufferPool::release(c10::DataPtr buffer, Bytes size) {
  in_use_ -= size;
  --live_;
  free_[size].push_back(std::move(buffer));
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
