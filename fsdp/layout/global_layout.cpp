#include "fsdp/layout/global_layout.h"

#include <algorithm>
#include <limits>

#include "fsdp/base/check.h"

namespace fsdp {
namespace {

std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace

ElementRange intersect(ElementRange a, ElementRange b) {
  const std::int64_t begin = std::clamp(b.begin, a.begin, a.end);
  return {begin, std::clamp(b.end, begin, a.end)};
}

GlobalLayout::GlobalLayout(std::span<const std::int64_t> tensor_sizes, std::int64_t shard_count,
                           std::int64_t shard_alignment)
    : shard_count_(shard_count) {
  FSDP_INVARIANT(shard_alignment > 0 && shard_alignment % kAlignment == 0);
  FSDP_CHECK(shard_count >= 1, UsageError, "a layout needs at least one shard, got {}", shard_count);
  std::int64_t offset = 0;
  for (std::int64_t size : tensor_sizes) {
    FSDP_CHECK(size >= 0, UsageError, "tensor {} has {} elements", tensors_.size(), size);
    FSDP_CHECK(size < std::numeric_limits<std::int64_t>::max() / 4 - offset, UsageError,
               "tensor {} overflows the packed range", tensors_.size());
    tensors_.push_back({offset, offset + size});
    offset = round_up(offset + size, kAlignment);
  }
  padded_size_ = round_up(offset, shard_alignment * shard_count);
}

ElementRange GlobalLayout::shard(const PlacementList& placements, std::span<const int> sizes,
                                 std::span<const int> coordinates) const {
  FSDP_INVARIANT(placements.size() == sizes.size() && sizes.size() == coordinates.size());
  ElementRange range{0, padded_size_};
  for (std::size_t axis = placements.size(); axis-- > 0;) {
    if (placements[axis] != Placement::flat) continue;
    FSDP_INVARIANT(range.length() % sizes[axis] == 0);
    const std::int64_t share = range.length() / sizes[axis];
    range.begin += share * coordinates[axis];
    range.end = range.begin + share;
  }
  return range;
}

}  // namespace fsdp
