// Reads elements of stored tensors, and checks what it reads against the checksums of the index.
//
// One thread. Keeps some of the files it has read from open. Throws UsageError naming file, tensor and byte of what is
// damaged.
#pragma once

#include <cstddef>
#include <map>
#include <span>
#include <vector>

#include "fsdp/checkpoint/tensor_index.h"

namespace fsdp::checkpoint {

class TensorReader {
 public:
  explicit TensorReader(const TensorIndex& index) : index_(index) {}  // kept by reference
  TensorReader(const TensorReader&) = delete;
  TensorReader& operator=(const TensorReader&) = delete;
  ~TensorReader();

  // The elements of `range`, in the order of the tensor's strides. `to` has exactly their bytes.
  void read(const std::string& key, ElementRange range, std::span<std::byte> to);
  [[nodiscard]] std::int64_t bytes_read() const { return bytes_read_; }  // from files, blocks for checksums included

 private:
  void read_checked(const std::string& key, const StoredPiece& piece, std::int64_t piece_bytes, std::int64_t begin,
                    std::span<std::byte> to);
  static constexpr std::size_t kMostOpen = 64;
  void close_all();
  void read_file(int file, std::int64_t offset, std::span<std::byte> to);

  const TensorIndex& index_;
  std::map<int, int> open_;  // file -> descriptor
  std::vector<std::byte> block_;
  std::int64_t bytes_read_ = 0;
};

[[nodiscard]] std::uint64_t checksum(std::span<const std::byte> bytes);

}  // namespace fsdp::checkpoint
