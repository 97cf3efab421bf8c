#include "fsdp/module/prefetch_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <span>
#include <vector>

namespace fsdp::testing {
namespace {

using ::testing::IsEmpty;
using Units = std::vector<int>;

Units list(std::span<const int> units) { return {units.begin(), units.end()}; }

const Units kForward = {0, 1, 2, 3}, kBackward = {0, 3, 2, 1};

// What follows each unit in a phase. [unit]
std::vector<Units> rows(const PrefetchTable& table, Phase phase) {
  std::vector<Units> result;
  for (int unit = 0; unit < 4; ++unit) result.push_back(list(table.after(phase, unit)));
  return result;
}

TEST(PrefetchTable, OfDepthZeroGathersNothingAhead) {
  const PrefetchTable table(kForward, kBackward, {true, true, true, true}, 0);
  for (Phase phase : {Phase::forward, Phase::backward}) EXPECT_EQ(rows(table, phase), std::vector<Units>(4));
}

TEST(PrefetchTable, OfDepthOneGathersTheNextUnit) {
  const PrefetchTable table(kForward, kBackward, {true, true, true, true}, 1);
  EXPECT_EQ(rows(table, Phase::forward), (std::vector<Units>{{1}, {2}, {3}, {}}));
  EXPECT_EQ(rows(table, Phase::backward), (std::vector<Units>{{3}, {}, {1}, {2}}));
}

TEST(PrefetchTable, OfDepthTwoGathersTheNextTwoNearestFirst) {
  const PrefetchTable table(kForward, kBackward, {true, true, true, true}, 2);
  EXPECT_EQ(rows(table, Phase::forward), (std::vector<Units>{{1, 2}, {2, 3}, {3}, {}}));
  EXPECT_EQ(rows(table, Phase::backward), (std::vector<Units>{{3, 2}, {}, {1}, {2, 1}}));
}

TEST(PrefetchTable, SkipsUnitsWithoutWeightsAndStillReachesItsDepth) {
  const PrefetchTable table(kForward, kBackward, {true, false, true, true}, 2);
  EXPECT_EQ(rows(table, Phase::forward), (std::vector<Units>{{2, 3}, {2, 3}, {3}, {}}));
  EXPECT_EQ(rows(table, Phase::backward), (std::vector<Units>{{3, 2}, {}, {}, {2}}));
}

TEST(PrefetchTable, TakesTheUsersLists) {
  PrefetchTable table(kForward, kBackward, {true, true, true, true}, 0);
  table.set(Phase::forward, 1, {3, 0});
  EXPECT_EQ(rows(table, Phase::forward), (std::vector<Units>{{}, {3, 0}, {}, {}}));
  EXPECT_EQ(rows(table, Phase::backward), std::vector<Units>(4));
}

// One iteration: what each need answered.
std::vector<Units> iterate(RecordedOrder& order, std::uint64_t signature, const Units& needs, int depth = 1) {
  std::vector<Units> answers;
  order.begin(signature);
  for (int unit : needs) answers.push_back(list(order.need(unit, depth)));
  order.end();
  return answers;
}

TEST(RecordedOrder, KnowsNothingInItsFirstIterationAndReplaysItAfterwards) {
  RecordedOrder order;
  EXPECT_EQ(iterate(order, 1, {5, 2, 2, 9}), std::vector<Units>(4));
  EXPECT_EQ(iterate(order, 1, {5, 2, 2, 9}), (std::vector<Units>{{2}, {2}, {9}, {}}));
  EXPECT_EQ(iterate(order, 1, {5, 2, 2, 9}, 3), (std::vector<Units>{{2, 2, 9}, {2, 9}, {9}, {}}));
  EXPECT_EQ(iterate(order, 1, {5, 2, 2, 9}, 0), std::vector<Units>(4));
  EXPECT_EQ(order.mismatches(), 0);
}

TEST(RecordedOrder, ADepartureIsCountedOnceEndsTheReplayAndIsLearned) {
  RecordedOrder order;
  (void)iterate(order, 1, {0, 1, 2, 3});
  EXPECT_EQ(iterate(order, 1, {0, 2, 1, 3}), (std::vector<Units>{{1}, {}, {}, {}}));
  EXPECT_EQ(order.mismatches(), 1);
  EXPECT_EQ(iterate(order, 1, {0, 2, 1, 3}), (std::vector<Units>{{2}, {1}, {3}, {}}));
  EXPECT_EQ(order.mismatches(), 1);
}

TEST(RecordedOrder, ALongerIterationIsADepartureAtItsEnd) {
  RecordedOrder order;
  (void)iterate(order, 1, {0, 1});
  EXPECT_EQ(iterate(order, 1, {0, 1, 2}), (std::vector<Units>{{1}, {}, {}}));
  EXPECT_EQ(order.mismatches(), 1);
}

TEST(RecordedOrder, AShorterIterationJustBecomesTheRecording) {
  RecordedOrder order;
  (void)iterate(order, 1, {0, 1, 2});
  EXPECT_EQ(iterate(order, 1, {0, 1}), (std::vector<Units>{{1}, {2}}));
  EXPECT_EQ(iterate(order, 1, {0, 1}), (std::vector<Units>{{1}, {}}));
  EXPECT_EQ(order.mismatches(), 0);
}

TEST(RecordedOrder, KeepsOneRecordingASignature) {
  RecordedOrder order;
  (void)iterate(order, 1, {0, 1});
  EXPECT_EQ(iterate(order, 2, {1, 0}), std::vector<Units>(2)) << "another input shape: nothing known yet";
  EXPECT_EQ(iterate(order, 1, {0, 1}), (std::vector<Units>{{1}, {}}));
  EXPECT_EQ(iterate(order, 2, {1, 0}), (std::vector<Units>{{0}, {}}));
  EXPECT_EQ(order.mismatches(), 0);
}

TEST(RecordedOrder, ADiscardedIterationLeavesTheRecordingAsItWas) {
  RecordedOrder order;
  (void)iterate(order, 1, {0, 1, 2});
  order.begin(1);
  EXPECT_TRUE(order.active());
  (void)order.need(0, 1);
  order.discard();
  EXPECT_FALSE(order.active());
  EXPECT_EQ(iterate(order, 1, {0, 1, 2}), (std::vector<Units>{{1}, {2}, {}}));
}

TEST(RecordedOrder, AnswersNothingOutsideAnIteration) {
  RecordedOrder order;
  (void)iterate(order, 1, {0, 1});
  EXPECT_FALSE(order.active());
  EXPECT_THAT(list(order.need(0, 1)), IsEmpty());
  order.end();  // without begin: changes nothing
  EXPECT_EQ(iterate(order, 1, {0, 1}), (std::vector<Units>{{1}, {}}));
}

}  // namespace
}  // namespace fsdp::testing
