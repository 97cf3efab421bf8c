#include "fsdp/data/permutation.h"

#include <gmock/gmock.h>

#include <cmath>
#include <set>
#include <vector>

#include "tests/data/temporary_folder.h"

namespace fsdp::testing {
namespace {

using data::Permutation;
using ::testing::HasSubstr;

std::vector<std::int64_t> all_of(std::int64_t size, std::uint64_t key) {
  const Permutation permutation(size, key);
  std::vector<std::int64_t> images;
  for (std::int64_t i = 0; i < size; ++i) images.push_back(permutation(i));
  return images;
}

TEST(Permutation, IsABijection) {
  std::vector<std::int64_t> sizes;
  for (std::int64_t size = 1; size <= 130; ++size) sizes.push_back(size);
  for (const std::int64_t size : {255, 256, 257, 509, 1000, 1023, 1024, 1025, 4093, 65536, 65537, 99991})
    sizes.push_back(size);
  for (const auto size : sizes) {
    for (const std::uint64_t key : {0, 1, 77}) {
      std::vector<bool> hit(static_cast<std::size_t>(size));
      for (const auto image : all_of(size, key)) {
        ASSERT_TRUE(image >= 0 && image < size) << size;
        ASSERT_FALSE(hit[static_cast<std::size_t>(image)]) << size << ": " << image << " comes twice";
        hit[static_cast<std::size_t>(image)] = true;
      }
    }
  }
}

TEST(Permutation, HugeRangesStayInside) {
  for (const std::int64_t size :
       {(std::int64_t{1} << 40) + 1, std::int64_t{1} << 62, std::numeric_limits<std::int64_t>::max()}) {
    const Permutation permutation(size, 5);
    std::set<std::int64_t> images;
    for (std::int64_t i = 0; i < 1000; ++i) images.insert(permutation(size - 1 - i));
    EXPECT_EQ(images.size(), 1000u);
    EXPECT_GE(*images.begin(), 0);
    EXPECT_LT(*images.rbegin(), size);
  }
}

TEST(Permutation, KeysGiveOtherOrders) {
  for (const std::int64_t size : {8, 100, 1000}) {
    std::set<std::vector<std::int64_t>> orders;
    for (std::uint64_t key = 0; key < 50; ++key) orders.insert(all_of(size, key));
    EXPECT_GE(orders.size(), 49u) << size;
  }
  std::set<std::vector<std::int64_t>> of_three;
  for (std::uint64_t key = 0; key < 200; ++key) of_three.insert(all_of(3, key));
  EXPECT_EQ(of_three.size(), 6u);  // every order there is
}

// Neighbours are torn apart: the mean distance of two images is that of two random numbers, a third of the range.
TEST(Permutation, ScattersNeighbours) {
  constexpr std::int64_t kSize = 10'000;
  double distance = 0;
  const auto images = all_of(kSize, 3);
  for (std::size_t i = 1; i < images.size(); ++i) distance += std::abs(static_cast<double>(images[i] - images[i - 1]));
  EXPECT_NEAR(distance / (kSize - 1) / kSize, 1.0 / 3, 0.01);
}

// The first element lands everywhere equally often over the keys: 64 places, 6400 keys, each 100 times in the mean.
TEST(Permutation, EveryPlaceIsAsLikely) {
  std::vector<int> counts(64);
  for (std::uint64_t key = 0; key < 6400; ++key) ++counts[static_cast<std::size_t>(Permutation(64, key)(0))];
  for (const int count : counts) EXPECT_NEAR(count, 100, 50);
}

TEST(Permutation, RefusesWhatIsOutside) {
  EXPECT_THAT(refusal([] { Permutation permutation(0, 1); }), HasSubstr("a permutation of 0 elements"));
  EXPECT_THAT(refusal([] { (void)Permutation(5, 1)(5); }), HasSubstr("element 5 of a permutation of 5"));
  EXPECT_THAT(refusal([] { (void)Permutation(5, 1)(-1); }), HasSubstr("element -1"));
}

}  // namespace
}  // namespace fsdp::testing
