#include "fsdp/layout/global_layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <numeric>
#include <vector>

#include "fsdp/base/error.h"

namespace fsdp::testing {
namespace {

using enum Placement;
constexpr std::int64_t kAlignment = GlobalLayout::kAlignment;

const std::vector<std::vector<std::int64_t>>& tensor_lists() {
  static const std::vector<std::vector<std::int64_t>> lists = {{},
                                                               {0},
                                                               {1},
                                                               {0, 0, 0},
                                                               {127},
                                                               {128},
                                                               {129},
                                                               {1, 1, 1},
                                                               {0, 1, 0, 300, 0},
                                                               {7 * 13, 3, 128, 256, 1000, 1},
                                                               {5000, 17},
                                                               {1, 0, 12'345, 2, 0}};
  return lists;
}

const std::vector<std::vector<int>>& meshes() {
  static const std::vector<std::vector<int>> sizes = {
      {1},    {2},    {3},    {4},    {5},    {6},    {7},       {8},       {9},       {1, 1},    {1, 4},   {4, 1},
      {2, 2}, {2, 3}, {3, 2}, {3, 3}, {2, 4}, {4, 2}, {1, 2, 1}, {2, 2, 2}, {1, 3, 3}, {2, 1, 3}, {3, 1, 2}};
  return sizes;
}

// All placement lists of flat and replicate (partial data is held whole, like replicate).
std::vector<PlacementList> placement_lists(std::size_t axes) {
  std::vector<PlacementList> lists = {{}};
  for (std::size_t axis = 0; axis < axes; ++axis) {
    std::vector<PlacementList> longer;
    for (const auto& list : lists) {
      for (Placement placement : {replicate, partial, flat}) {
        longer.push_back(list);
        longer.back().push_back(placement);
      }
    }
    lists = std::move(longer);
  }
  return lists;
}

std::vector<std::vector<int>> all_coordinates(const std::vector<int>& sizes) {
  std::vector<std::vector<int>> coordinates;
  const int ranks = std::accumulate(sizes.begin(), sizes.end(), 1, std::multiplies<>());
  for (int rank = 0; rank < ranks; ++rank) {
    std::vector<int> c(sizes.size());
    for (int rest = rank, axis = static_cast<int>(sizes.size()); axis-- > 0; rest /= sizes[axis])
      c[axis] = rest % sizes[axis];
    coordinates.push_back(c);
  }
  return coordinates;
}

TEST(GlobalLayout, TensorsAreDisjointInOrderAndAligned) {
  for (const auto& sizes : tensor_lists()) {
    for (int shards = 1; shards <= 9; ++shards) {
      const GlobalLayout layout(sizes, shards);
      ASSERT_EQ(layout.tensors().size(), sizes.size());
      std::vector<int> owners(static_cast<std::size_t>(layout.padded_size().value()));
      std::int64_t previous_end = 0;
      for (std::size_t t = 0; t < sizes.size(); ++t) {
        const ElementRange range = layout.tensors()[t];
        ASSERT_EQ(range.length(), sizes[t]);
        ASSERT_EQ(range.begin % kAlignment, 0);
        ASSERT_GE(range.begin, previous_end);
        ASSERT_LE(range.end, layout.padded_size().value());
        previous_end = range.end;
        for (auto i = range.begin; i < range.end; ++i)
          ASSERT_EQ(++owners[static_cast<std::size_t>(i)], 1) << "element " << i << " of tensor " << t;
      }
    }
  }
}

TEST(GlobalLayout, PaddingIsTheLeastThatMakesEqualAlignedShards) {
  for (const auto& sizes : tensor_lists()) {
    std::int64_t packed = 0;
    for (auto size : sizes) packed += (size + kAlignment - 1) / kAlignment * kAlignment;
    for (int shards = 1; shards <= 9; ++shards) {
      const auto padded = GlobalLayout(sizes, shards).padded_size().value();
      ASSERT_EQ(padded % (kAlignment * shards), 0);
      ASSERT_GE(padded, packed);
      ASSERT_LT(padded - packed, kAlignment * shards);
    }
  }
}

TEST(GlobalLayout, ShardsAreMultiplesOfTheAlignmentThatWasAskedFor) {
  for (const auto& sizes : tensor_lists()) {
    for (int shards = 1; shards <= 5; ++shards) {
      const std::int64_t alignment = 8 * kAlignment;
      const GlobalLayout plain(sizes, shards), wide(sizes, shards, alignment);
      const auto padded = wide.padded_size().value();
      ASSERT_EQ(padded % (alignment * shards), 0);
      ASSERT_LT(padded - plain.padded_size().value(), alignment * shards);
      EXPECT_EQ(wide.tensors(), plain.tensors());  // only the end moves
    }
  }
}

TEST(GlobalLayout, ShardsAreEqualAlignedAndCoverEverythingOnce) {
  for (const auto& tensor_sizes : tensor_lists()) {
    for (const auto& sizes : meshes()) {
      const int ranks = std::accumulate(sizes.begin(), sizes.end(), 1, std::multiplies<>());
      const GlobalLayout layout(tensor_sizes, ranks);
      const auto padded = layout.padded_size().value();
      for (const auto& placements : placement_lists(sizes.size())) {
        SCOPED_TRACE(to_string(placements) + " over " + ::testing::PrintToString(sizes));
        std::int64_t pieces = 1;
        for (std::size_t axis = 0; axis < sizes.size(); ++axis) pieces *= placements[axis] == flat ? sizes[axis] : 1;
        std::vector<int> copies(static_cast<std::size_t>(padded / kAlignment));  // [block of kAlignment elements]
        for (const auto& coordinates : all_coordinates(sizes)) {
          const ElementRange shard = layout.shard(placements, sizes, coordinates);
          ASSERT_EQ(shard.length(), padded / pieces);
          ASSERT_EQ(shard.begin % kAlignment, 0);
          ASSERT_EQ(shard.end % kAlignment, 0);
          ASSERT_GE(shard.begin, 0);
          ASSERT_LE(shard.end, padded);
          for (auto block = shard.begin / kAlignment; block < shard.end / kAlignment; ++block)
            ++copies[static_cast<std::size_t>(block)];
        }
        for (int count : copies) ASSERT_EQ(count, ranks / pieces);  // once a replica
      }
    }
  }
}

TEST(GlobalLayout, TheLastFlatAxisMakesTheLargePiecesAndTheFirstTheSmallest) {
  const std::vector<int> sizes = {2, 3};
  const GlobalLayout layout(std::vector<std::int64_t>{6 * kAlignment}, 6);
  for (int outer = 0; outer < 2; ++outer) {
    for (int inner = 0; inner < 3; ++inner) {
      const std::vector<int> at = {outer, inner};
      const std::int64_t begin = (inner * 2 + outer) * kAlignment;
      EXPECT_EQ(layout.shard({flat, flat}, sizes, at), (ElementRange{begin, begin + kAlignment}));
      EXPECT_EQ(layout.shard({replicate, flat}, sizes, at),
                (ElementRange{inner * 2 * kAlignment, (inner + 1) * 2 * kAlignment}));
      EXPECT_EQ(layout.shard({flat, replicate}, sizes, at),
                (ElementRange{outer * 3 * kAlignment, (outer + 1) * 3 * kAlignment}));
      EXPECT_EQ(layout.shard({replicate, partial}, sizes, at), (ElementRange{0, 6 * kAlignment}));
    }
  }
}

TEST(GlobalLayout, SplittingOneMoreAxisOnTheLeftStaysInsideTheShare) {
  for (const auto& sizes : meshes()) {
    const GlobalLayout layout(std::vector<std::int64_t>{999, 1, 0, 4000},
                              std::accumulate(sizes.begin(), sizes.end(), 1, std::multiplies<>()));
    for (const auto& coordinates : all_coordinates(sizes)) {
      PlacementList placements(sizes.size(), replicate);
      ElementRange outer = layout.shard(placements, sizes, coordinates);
      for (std::size_t axis = sizes.size(); axis-- > 0;) {
        placements[axis] = flat;
        const ElementRange inner = layout.shard(placements, sizes, coordinates);
        ASSERT_EQ(inner.begin, outer.begin + inner.length() * coordinates[axis]);
        ASSERT_EQ(inner.length() * sizes[axis], outer.length());
        outer = inner;
      }
    }
  }
}

TEST(GlobalLayout, IsTheSameWhateverTheDtype) {
  const GlobalLayout layout(std::vector<std::int64_t>{10, 200}, 3);
  EXPECT_EQ(layout.shard_count(), 3);
  EXPECT_EQ(layout.tensors()[1], (ElementRange{128, 328}));
  EXPECT_EQ(layout.padded_size(), Elements(384));
}

TEST(GlobalLayout, RefusesImpossibleSizes) {
  const auto message = [](std::vector<std::int64_t> sizes, std::int64_t shards) -> std::string {
    try {
      (void)GlobalLayout(sizes, shards);
    } catch (const UsageError& error) {
      return error.what();
    }
    return "accepted";
  };
  EXPECT_EQ(message({1}, 0), "a layout needs at least one shard, got 0");
  EXPECT_EQ(message({4, -1}, 2), "tensor 1 has -1 elements");
  EXPECT_EQ(message({1, std::numeric_limits<std::int64_t>::max() / 2}, 2), "tensor 1 overflows the packed range");
}

TEST(ElementRanges, IntersectEqualsBruteForceAndEmptyOnesStayInside) {
  for (int a = 0; a < 6; ++a) {
    for (int b = a; b < 6; ++b) {
      for (int c = 0; c < 6; ++c) {
        for (int d = c; d < 6; ++d) {
          int common = 0;
          for (int i = 0; i < 6; ++i) common += a <= i && i < b && c <= i && i < d;
          const ElementRange result = intersect({a, b}, {c, d});
          ASSERT_EQ(result.length(), common);
          ASSERT_GE(result.begin, a);
          ASSERT_LE(result.end, b);
          if (common > 0)
            ASSERT_EQ(result, (ElementRange{std::max(a, c), std::min(b, d)}));
          else
            ASSERT_TRUE(result.empty());
        }
      }
    }
  }
}

}  // namespace
}  // namespace fsdp::testing
