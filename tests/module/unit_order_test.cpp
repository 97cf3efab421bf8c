#include "fsdp/module/unit_order.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace fsdp::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(UnitOrder, IsEmptyWithoutRoots) {
  EXPECT_THAT(forward_order({}), IsEmpty());
  EXPECT_THAT(backward_order({}), IsEmpty());
}

TEST(UnitOrder, OfAFlatModelIsTheRootAndItsLayersEachWay) {
  const UnitTree tree{.roots = {3}, .children = {{}, {}, {}, {0, 1, 2}}};
  EXPECT_THAT(forward_order(tree), ElementsAre(3, 0, 1, 2));
  EXPECT_THAT(backward_order(tree), ElementsAre(3, 2, 1, 0));
}

TEST(UnitOrder, OfANestedTreeIsNotItsOwnReverseInBackward) {
  // 0 holds 1 (2 and 3) and 4 (5).
  const UnitTree tree{.roots = {0}, .children = {{1, 4}, {2, 3}, {}, {}, {5}, {}}};
  EXPECT_THAT(forward_order(tree), ElementsAre(0, 1, 2, 3, 4, 5));
  EXPECT_THAT(backward_order(tree), ElementsAre(0, 4, 5, 1, 3, 2));
  auto reversed = forward_order(tree);
  std::reverse(reversed.begin(), reversed.end());
  EXPECT_NE(backward_order(tree), reversed);
}

TEST(UnitOrder, FollowsExecutionAndNotTheNumbering) {
  const UnitTree tree{.roots = {4}, .children = {{}, {3}, {}, {}, {2, 1, 0}}};
  EXPECT_THAT(forward_order(tree), ElementsAre(4, 2, 1, 3, 0));
  EXPECT_THAT(backward_order(tree), ElementsAre(4, 0, 1, 3, 2));
}

TEST(UnitOrder, OfTwoRootsRunsTheLastRootFirstInBackward) {
  const UnitTree tree{.roots = {0, 3}, .children = {{1, 2}, {}, {}, {4}, {}}};
  EXPECT_THAT(forward_order(tree), ElementsAre(0, 1, 2, 3, 4));
  EXPECT_THAT(backward_order(tree), ElementsAre(3, 4, 0, 2, 1));
}

TEST(UnitOrder, HoldsEveryUnitOnceBothWays) {
  const UnitTree tree{.roots = {6, 0}, .children = {{1}, {2, 3}, {}, {4, 5}, {}, {}, {7}, {8}, {}}};
  for (auto order : {forward_order(tree), backward_order(tree)}) {
    std::sort(order.begin(), order.end());
    EXPECT_THAT(order, ElementsAre(0, 1, 2, 3, 4, 5, 6, 7, 8));
  }
}

}  // namespace
}  // namespace fsdp::testing
