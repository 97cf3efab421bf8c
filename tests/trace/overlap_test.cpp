#include "fsdp/trace/overlap.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace fsdp::trace {

void PrintTo(const Interval& interval, std::ostream* out) {
  *out << "[" << interval.begin << ", " << interval.end << ")";
}

}  // namespace fsdp::trace

namespace fsdp::testing {
namespace {

using trace::Interval;
using trace::IntervalSet;
using trace::Kind;
using trace::Span;

constexpr int kTicks = 40;
using Ticks = std::vector<bool>;  // [time] covered

Ticks ticks_of(const std::vector<Interval>& intervals) {
  Ticks covered(kTicks);
  for (const Interval& interval : intervals) {
    for (auto t = interval.begin; t < interval.end; ++t) covered[static_cast<std::size_t>(t)] = true;
  }
  return covered;
}

IntervalSet intervals_of(const Ticks& covered) {
  IntervalSet result;
  for (int t = 0; t < kTicks; ++t) {
    if (!covered[t]) continue;
    if (!result.empty() && result.back().end == t)
      ++result.back().end;
    else
      result.push_back({t, t + 1});
  }
  return result;
}

std::vector<Interval> random_intervals(std::mt19937& random) {
  std::vector<Interval> intervals(random() % 7);
  for (auto& interval : intervals) {
    interval.begin = static_cast<std::int64_t>(random() % kTicks);
    interval.end =
        interval.begin + static_cast<std::int64_t>(random() % (kTicks + 1 - interval.begin)) / (random() % 2 ? 4 : 1);
    if (random() % 10 == 0) std::swap(interval.begin, interval.end);  // reversed: counts as empty
  }
  return intervals;
}

TEST(IntervalArithmetic, UniteEqualsBruteForce) {
  std::mt19937 random(1);
  for (int round = 0; round < 3000; ++round) {
    const auto intervals = random_intervals(random);
    ASSERT_EQ(trace::unite(intervals), intervals_of(ticks_of(intervals))) << ::testing::PrintToString(intervals);
  }
}

TEST(IntervalArithmetic, SubtractAndLengthEqualBruteForce) {
  std::mt19937 random(2);
  for (int round = 0; round < 3000; ++round) {
    const auto a = trace::unite(random_intervals(random)), b = trace::unite(random_intervals(random));
    Ticks left = ticks_of(a);
    const Ticks cut = ticks_of(b);
    std::int64_t count = 0;
    for (int t = 0; t < kTicks; ++t) count += left[t] = left[t] && !cut[t];
    const auto difference = trace::subtract(a, b);
    ASSERT_EQ(difference, intervals_of(left))
        << ::testing::PrintToString(a) << " minus " << ::testing::PrintToString(b);
    ASSERT_EQ(trace::length(difference), count);
  }
}

TEST(IntervalArithmetic, OverlapEqualsBruteForce) {
  std::mt19937 random(3);
  for (int round = 0; round < 3000; ++round) {
    const auto set = trace::unite(random_intervals(random));
    const auto begin = static_cast<std::int64_t>(random() % kTicks);
    const Interval interval{begin, begin + static_cast<std::int64_t>(random() % (kTicks + 1 - begin))};
    const Ticks covered = ticks_of(set);
    std::int64_t count = 0;
    for (auto t = interval.begin; t < interval.end; ++t) count += covered[static_cast<std::size_t>(t)];
    ASSERT_EQ(trace::overlap(interval, set), count);
  }
}

Span span(Kind kind, std::int64_t begin, std::int64_t end, int stream = 1) {
  return {.name = "s", .kind = kind, .stream = stream, .begin = begin, .end = end};
}

TEST(OverlapReport, CountsUnionsAndNotSums) {
  const std::vector<Span> spans = {
      span(Kind::compute, 0, 100, 0),     span(Kind::compute, 50, 120, 0),  // 120 busy, 170 as a sum
      span(Kind::all_gather, 80, 140, 1), span(Kind::all_reduce, 100, 160, 2), span(Kind::reduce_scatter, 200, 210, 2),
  };
  const auto report = trace::overlap_report(spans);
  EXPECT_EQ(report.compute, 120);
  EXPECT_EQ(report.communication, 90);  // [80, 160) and [200, 210)
  EXPECT_EQ(report.hidden, 40);
  EXPECT_EQ(report.exposed, 50);
  EXPECT_EQ(report.elapsed, 210);
  EXPECT_EQ(report.idle, 40);  // [160, 200)
}

TEST(OverlapReport, TakesWaitsOutOfCompute) {
  const std::vector<Span> spans = {span(Kind::compute, 0, 100, 0), span(Kind::wait, 20, 60, 0),
                                   span(Kind::all_gather, 10, 60)};
  const auto report = trace::overlap_report(spans);
  EXPECT_EQ(report.compute, 60);
  EXPECT_EQ(report.hidden, 10);
  EXPECT_EQ(report.exposed, 40);
  EXPECT_EQ(report.idle, 0);
  ASSERT_EQ(report.collectives.size(), 1u);
  EXPECT_EQ(report.collectives[0].hidden, 10);
}

TEST(OverlapReport, IgnoresUnfinishedSpansAndUnits) {
  const std::vector<Span> spans = {
      span(Kind::unit, 0, 1000, 0),
      span(Kind::compute, 10, 20, 0),
      span(Kind::compute, 20, trace::kUnset, 0),
      span(Kind::all_gather, 12, 18),
      span(Kind::all_gather, 5, trace::kUnset),
      {.name = "queued", .kind = Kind::all_gather},  // issued, never begun
  };
  const auto report = trace::overlap_report(spans);
  EXPECT_EQ(report.elapsed, 10);
  EXPECT_EQ(report.compute, 10);
  EXPECT_EQ(report.communication, 6);
  EXPECT_EQ(report.count(Kind::all_gather), 1);
}

TEST(OverlapReport, IsEmptyWithoutFinishedSpans) {
  for (const auto& spans : {std::vector<Span>{}, std::vector<Span>{{.kind = Kind::compute}}}) {
    const auto report = trace::overlap_report(spans);
    EXPECT_EQ(report.elapsed, 0);
    EXPECT_EQ(report.idle, 0);
    EXPECT_TRUE(report.collectives.empty());
  }
}

TEST(OverlapReport, ACollectiveOverlapsFromNinetyPercentOn) {
  const auto report = trace::overlap_report(std::vector<Span>{
      span(Kind::compute, 0, 900, 0), span(Kind::all_gather, 0, 1000),  // 90 %: overlapped
      span(Kind::all_gather, 0, 1001),                                  // just under
      span(Kind::all_gather, 800, 900),                                 // all of it
      span(Kind::all_gather, 900, 1000),                                // none of it
      span(Kind::reduce_scatter, 801, 911)                              // 99 of 110 = 90 %
  });
  EXPECT_EQ(report.count(Kind::all_gather), 4);
  EXPECT_EQ(report.overlapped(Kind::all_gather), 2);
  EXPECT_TRUE(report.collectives[0].overlapped());
  EXPECT_FALSE(report.collectives[1].overlapped());
  EXPECT_EQ(report.overlapped(Kind::reduce_scatter), 1);
  EXPECT_EQ(report.count(Kind::all_reduce), 0);
}

TEST(OverlapReport, LeavesOutCollectivesThatTookNoTime) {
  const auto report =
      trace::overlap_report(std::vector<Span>{span(Kind::compute, 0, 10, 0), span(Kind::all_gather, 4, 4)});
  EXPECT_EQ(report.count(Kind::all_gather), 0);
  EXPECT_EQ(report.communication, 0);
}

TEST(OverlapReport, KeepsIssueOrderWhateverTheTimes) {
  const auto report =
      trace::overlap_report(std::vector<Span>{span(Kind::reduce_scatter, 50, 60), span(Kind::all_gather, 0, 10)});
  ASSERT_EQ(report.collectives.size(), 2u);
  EXPECT_EQ(report.collectives[0].span.kind, Kind::reduce_scatter);
  EXPECT_EQ(report.collectives[1].span.kind, Kind::all_gather);
}

TEST(OverlapReport, EqualsBruteForceOnRandomSpans) {
  std::mt19937 random(4);
  for (int round = 0; round < 1000; ++round) {
    std::vector<Span> spans;
    std::vector<Interval> of[3];  // compute, wait, communication
    for (int i = static_cast<int>(random() % 12); i > 0; --i) {
      const int which = static_cast<int>(random() % 3);
      const auto begin = static_cast<std::int64_t>(random() % kTicks);
      const auto end = begin + static_cast<std::int64_t>(random() % (kTicks + 1 - begin));
      spans.push_back(span(which == 0 ? Kind::compute : which == 1 ? Kind::wait : Kind::all_gather, begin, end));
      of[which].push_back({begin, end});
    }
    const Ticks compute = ticks_of(of[0]), wait = ticks_of(of[1]), moving = ticks_of(of[2]);
    std::int64_t busy = 0, hidden = 0, exposed = 0, neither = 0;
    for (int t = 0; t < kTicks; ++t) {
      const bool b = compute[t] && !wait[t];
      busy += b;
      hidden += moving[t] && b;
      exposed += moving[t] && !b;
    }
    const auto report = trace::overlap_report(spans);
    if (!spans.empty()) neither = report.elapsed - busy - exposed;
    ASSERT_EQ(report.compute, busy);
    ASSERT_EQ(report.hidden, hidden);
    ASSERT_EQ(report.exposed, exposed);
    ASSERT_EQ(report.communication, hidden + exposed);
    ASSERT_EQ(report.idle, neither);
  }
}

TEST(OverlapReport, ReadsAsOneLine) {
  const auto text = trace::to_string(trace::overlap_report(
      std::vector<Span>{span(Kind::compute, 0, 2'000'000, 0), span(Kind::all_gather, 1'000'000, 2'000'000),
                        span(Kind::all_gather, 1'500'000, 3'500'000)}));
  EXPECT_EQ(text,
            "elapsed 3.500 ms, compute 2.000, communication 2.500 (hidden 1.000, exposed 1.500), idle 0.000; "
            "all_gather 1 of 2 overlapped");
}

}  // namespace
}  // namespace fsdp::testing
