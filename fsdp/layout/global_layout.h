// Packs the tensors of one parameter group into one flat range of elements.
//
// Coordinates are elements, so buffers of any dtype share one layout. Every tensor start and every shard end is a
// multiple of kAlignment elements; the range is padded to equal shards. A pure function of the sizes and the number of
// shards: equal on every rank without communication. Scalars (one element) and empty tensors are legal.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "fsdp/base/types.h"
#include "fsdp/layout/placement.h"

namespace fsdp {

// Half-open range of elements, in the coordinates of the packed range or of one tensor.
struct ElementRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  [[nodiscard]] std::int64_t length() const { return end - begin; }
  [[nodiscard]] bool empty() const { return end <= begin; }
  bool operator==(const ElementRange&) const = default;
};

// Empty ranges come back as {b, b} with b inside `a`'s bounds.
[[nodiscard]] ElementRange intersect(ElementRange a, ElementRange b);

class GlobalLayout {
 public:
  static constexpr std::int64_t kAlignment = 128;  // elements

  GlobalLayout() = default;
  // `tensor_sizes` in elements, [tensor index]; `shard_count` is the largest number of pieces the range is ever split
  // into (the product of the sizes of all axes that are flat in any placement).
  // `shard_alignment`: every shard is a multiple of so many elements.
  GlobalLayout(std::span<const std::int64_t> tensor_sizes, std::int64_t shard_count,
               std::int64_t shard_alignment = kAlignment);

  [[nodiscard]] Elements padded_size() const { return Elements(padded_size_); }
  [[nodiscard]] std::int64_t shard_count() const { return shard_count_; }
  [[nodiscard]] const std::vector<ElementRange>& tensors() const {
    return tensors_;
  }  // [tensor index], without padding

  // The share of the packed range that a rank holds under `placements`: flat axes split it one inside the other, the
  // last axis first. `sizes` and `coordinates` are those of the mesh, [axis].
  [[nodiscard]] ElementRange shard(const PlacementList& placements, std::span<const int> sizes,
                                   std::span<const int> coordinates) const;

 private:
  std::int64_t padded_size_ = 0;
  std::int64_t shard_count_ = 1;
  std::vector<ElementRange> tensors_;
};

}  // namespace fsdp
