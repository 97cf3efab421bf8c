// Device memory by the driver's virtual memory functions: pieces of it, and ranges of addresses that show several
// pieces one after the other, of this process and of others.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "fsdp/base/types.h"

namespace fsdp {

// A piece of memory of one device. Lives as long as a handle or a range shows it, in whatever process.
class MemoryPiece {
 public:
  // On the current device. `shareable`: other processes may map it. Throws Error.
  static std::shared_ptr<MemoryPiece> create(Bytes size, bool shareable);
  // Of at least that size.
  static std::shared_ptr<MemoryPiece> create_rounded(Bytes size, bool shareable);
  // Another process's piece; closes the descriptor.
  static std::shared_ptr<MemoryPiece> import(int descriptor, Bytes size);
  ~MemoryPiece();
  MemoryPiece(const MemoryPiece&) = delete;
  MemoryPiece& operator=(const MemoryPiece&) = delete;

  [[nodiscard]] int export_descriptor() const;  // the caller closes it
  [[nodiscard]] Bytes size() const { return size_; }
  [[nodiscard]] CUmemGenericAllocationHandle handle() const { return handle_; }

 private:
  MemoryPiece(CUmemGenericAllocationHandle handle, Bytes size) : handle_(handle), size_(size) {}
  CUmemGenericAllocationHandle handle_;
  Bytes size_;
};

// Addresses that show pieces in order, for reading and writing by the current device.
class MappedRange {
 public:
  explicit MappedRange(std::vector<std::shared_ptr<MemoryPiece>> pieces);
  ~MappedRange();
  MappedRange(const MappedRange&) = delete;
  MappedRange& operator=(const MappedRange&) = delete;

  [[nodiscard]] void* data() const { return reinterpret_cast<void*>(base_); }
  [[nodiscard]] Bytes size() const { return size_; }

 private:
  void unmap(std::size_t count);

  std::vector<std::shared_ptr<MemoryPiece>> pieces_;
  CUdeviceptr base_ = 0;
  Bytes size_;
};

// Sizes of pieces are multiples of it. 0: the device cannot share memory so.
[[nodiscard]] Bytes piece_granularity();

}  // namespace fsdp
