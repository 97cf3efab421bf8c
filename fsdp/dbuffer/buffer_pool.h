// Memory for buffers that come and go on one stream, such as gathered weights.
//
// Buffers of the same size are reused in stream order: whoever takes one must use it first on the stream on which its
// last user was released. Host thread of the rank only.
#pragma once

#include <c10/core/Allocator.h>

#include <map>
#include <memory>
#include <vector>

#include "fsdp/runtime/runtime.h"

namespace fsdp {

class BufferPool {
 public:
  explicit BufferPool(std::shared_ptr<Runtime> runtime) : runtime_(std::move(runtime)) {}

  [[nodiscard]] c10::DataPtr acquire(Bytes size);
  void release(c10::DataPtr buffer, Bytes size);
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

  std::shared_ptr<Runtime> runtime_;
  std::map<Bytes, std::vector<c10::DataPtr>> free_;
  Bytes in_use_, peak_, reserved_;
  int live_ = 0, peak_live_ = 0;
};

}  // namespace fsdp
