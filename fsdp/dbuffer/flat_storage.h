// Memory that comes and goes under views that stay.
//
// Views made here share one StorageImpl for life. Attaching and detaching only swaps its pointer, so views that
// autograd saved follow and version counters do not move. While nothing is attached every read throws
// `released_message` (unguarded, many operators would crash the process). Swapping costs about 10 ns and allocates
// nothing. Not thread-safe.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "fsdp/base/types.h"

namespace fsdp {

class FlatStorage {
 public:
  FlatStorage() = default;
  FlatStorage(c10::Device device, Bytes size, const std::string& released_message);

  void set_released_message(const std::string& message);
  void attach(c10::DataPtr data);             // takes ownership
  c10::DataPtr detach();                      // gives it back; the storage is released afterwards
  [[nodiscard]] c10::DataPtr borrow() const;  // the same memory for another storage, which keeps this one alive
  [[nodiscard]] bool attached() const { return attached_; }

  [[nodiscard]] void* data() const;  // null while released, and on devices without data
  [[nodiscard]] Bytes size() const { return size_; }

  // A new tensor over part of the storage; `offset` in elements of `dtype`.
  [[nodiscard]] at::Tensor view(c10::ScalarType dtype, std::int64_t offset, at::IntArrayRef sizes,
                                at::IntArrayRef strides) const;
  [[nodiscard]] at::Tensor view(c10::ScalarType dtype, std::int64_t offset, std::int64_t count) const;

  [[nodiscard]] const c10::Storage& storage() const { return storage_; }

 private:
  c10::Storage storage_;
  Bytes size_;
  bool attached_ = false;
};

}  // namespace fsdp
