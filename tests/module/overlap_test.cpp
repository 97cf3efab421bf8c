// Which collective hides under which compute, exactly, on the virtual clock: four equal linear units, two microbatches.
#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

#include "fsdp/trace/overlap.h"
#include "tests/support/stack_model.h"

namespace fsdp::testing {
namespace {

constexpr int kRanks = 4, kUnits = 4;
constexpr std::int64_t kWidth = 2048, kBatch = 8192;

struct Outcome {
  trace::OverlapReport overlap;
  ContextCounters counters;
  MemoryReport memory;
  trace::Nanoseconds gather = 0, reduction = 0;  // duration of one collective
};

Outcome run(const Strategy& strategy, const ContextOptions& options, int units = kUnits, int microbatches = 2,
            const std::vector<MeshAxis>& axes = {{"dp", kRanks}}) {
  auto world = World::simulated(kRanks);
  ContextOptions recorded = options;
  recorded.recorder = std::make_shared<trace::Recorder>();
  auto context = FsdpContext::create(DeviceMesh(world, axes), recorded);
  Stack model(units, kWidth);
  UnitOptions unit{.placements = strategy};
  shard_stack(*context, model, unit);
  context->finalize();
  Outcome outcome;
  for (int step = 0; step < 2; ++step) {  // the second is steady: prefetch orders are known
    recorded.recorder->clear();
    context->reset_peaks();
    for (int m = 0; m < microbatches; ++m) {
      auto scope = context->microbatch({.is_last = m + 1 == microbatches});
      // No loss in between: nothing computes at the turn.
      model->forward(at::empty({kBatch, kWidth}, at::kMeta).set_requires_grad(true))
          .backward(at::empty({kBatch, kWidth}, at::kMeta));
    }
    for (auto& leaf : context->parameters()) leaf.mutable_grad().reset();
  }
  const auto spans = recorded.recorder->spans();
  outcome.overlap = trace::overlap_report(spans);
  outcome.counters = context->counters();
  outcome.memory = context->memory_report();
  for (const auto& collective : outcome.overlap.collectives) {
    (collective.span.kind == trace::Kind::all_gather ? outcome.gather : outcome.reduction) = collective.duration();
  }
  return outcome;
}

void expect_counts(const Outcome& outcome, int gathers, int hidden_gathers, int reductions, int hidden_reductions) {
  SCOPED_TRACE(trace::to_string(outcome.overlap));
  EXPECT_EQ(outcome.overlap.count(trace::Kind::all_gather), gathers);
  EXPECT_EQ(outcome.overlap.overlapped(trace::Kind::all_gather), hidden_gathers);
  EXPECT_EQ(outcome.overlap.count(trace::Kind::reduce_scatter), reductions);
  EXPECT_EQ(outcome.overlap.overlapped(trace::Kind::reduce_scatter), hidden_reductions);
}

ContextOptions without_keep_last() {
  ContextOptions options;
  options.keep_last = false;
  return options;
}

TEST(Overlap, Zero3HidesTwelveOfSixteenGathersAndSixOfEightReductions) {
  const Outcome outcome = run(zero3("dp"), without_keep_last());
  expect_counts(outcome, 16, 12, 8, 6);
  // Exposed a microbatch: the first gather, the gather at the turn, the last reduction. Nothing else.
  EXPECT_EQ(outcome.overlap.exposed, 2 * (2 * outcome.gather + outcome.reduction));
}

TEST(Overlap, KeepLastSavesTheGatherAtTheTurn) {
  const Outcome outcome = run(zero3("dp"), {});
  expect_counts(outcome, 14, 12, 8, 6);
  EXPECT_EQ(outcome.overlap.exposed, 2 * (outcome.gather + outcome.reduction));
}

TEST(Overlap, OneMicrobatchHidesSixOfSixGathersThatCanBeHiddenAndThreeReductions) {
  expect_counts(run(zero3("dp"), {}, kUnits, 1), 7, 6, 4, 3);
}

TEST(Overlap, KeepFirstSavesTheFirstGatherOfLaterMicrobatches) {
  ContextOptions options;
  options.keep_first = true;
  const Outcome outcome = run(zero3("dp"), options);
  expect_counts(outcome, 13, 12, 8, 6);
}

TEST(Overlap, Zero1GathersAndReducesOnceAStep) { expect_counts(run(zero1("dp"), {}), 4, 3, 4, 3); }
TEST(Overlap, Zero2GathersOnceAndReducesEveryMicrobatch) { expect_counts(run(zero2("dp"), {}), 4, 3, 8, 6); }

// The copies of a hybrid are summed behind the shards' reduction, on the last microbatch, under the next unit's
// backward.
TEST(Overlap, OnlyTheLastAllReduceOfHybridCopiesIsExposed) {
  const Outcome outcome = run(hsdp("copies", "dp"), {}, kUnits, 2, {{"copies", 2}, {"dp", 2}});
  expect_counts(outcome, 14, 12, 8, 6);
  EXPECT_EQ(outcome.overlap.count(trace::Kind::all_reduce), 4);
  EXPECT_EQ(outcome.overlap.overlapped(trace::Kind::all_reduce), 3);
}

TEST(Overlap, LastMicrobatchPolicyReducesOnce) {
  ContextOptions options;
  options.reduce = ReducePolicy::last_microbatch;
  expect_counts(run(zero3("dp"), options), 14, 12, 4, 3);
}

TEST(Overlap, WithoutPrefetchNoGatherIsHidden) {
  ContextOptions options = without_keep_last();
  options.prefetch = Prefetch::none();
  const Outcome outcome = run(zero3("dp"), options);
  expect_counts(outcome, 16, 0, 8, 0);  // a reduction runs while compute waits for the next gather
  EXPECT_GE(outcome.overlap.exposed, 16 * outcome.gather);
}

TEST(Overlap, EveryPrefetchPolicyHidesTheSame) {
  for (Prefetch prefetch : {Prefetch::depth(2), Prefetch::depth(3), Prefetch::recorded(1)}) {
    SCOPED_TRACE(static_cast<int>(prefetch.kind) * 10 + prefetch.amount);
    ContextOptions options;
    options.prefetch = prefetch;
    expect_counts(run(zero3("dp"), options), 14, 12, 8, 6);
  }
}

TEST(Overlap, DelayedReleaseHidesWithoutAnOrderAndReusesWhatIsStillThereAtTheTurn) {
  ContextOptions options;
  options.prefetch = Prefetch::delayed_release(1);
  expect_counts(run(zero3("dp"), options), 14, 12, 8, 6);
  options.prefetch = Prefetch::delayed_release(2);
  expect_counts(run(zero3("dp"), options), 12, 10, 8, 6);
  options.prefetch = Prefetch::delayed_release(0);
  expect_counts(run(zero3("dp"), options), 14, 0, 8, 0);
}

TEST(Overlap, DelayedReductionsHideAsMuch) {
  ContextOptions options;
  options.reduction = Reduction::delayed(1);
  expect_counts(run(zero3("dp"), options), 14, 12, 8, 6);
}

TEST(Overlap, UnifiedStreamRunsOneCollectiveAtATime) {
  ContextOptions options;
  options.unify_communication_stream = true;
  const Outcome outcome = run(zero3("dp"), options);
  expect_counts(outcome, 14, 12, 8, 6);
  std::vector<trace::Interval> intervals;
  for (const auto& collective : outcome.overlap.collectives)
    intervals.push_back({collective.span.begin, collective.span.end});
  trace::Nanoseconds sum = 0;
  for (const auto& interval : intervals) sum += interval.end - interval.begin;
  EXPECT_EQ(trace::length(trace::unite(intervals)), sum);
}

TEST(Overlap, GathersAndReductionsRunOnTwoStreamsApartFromCompute) {
  const Outcome outcome = run(zero3("dp"), {});
  for (const auto& collective : outcome.overlap.collectives) {
    EXPECT_EQ(collective.span.stream, collective.span.kind == trace::Kind::all_gather ? 1 : 2);
  }
}

TEST(Overlap, LiveUnitsAndSlotsDependOnThePolicyAndNotOnDepthOfTheModel) {
  for (int units : {4, 12}) {
    for (int depth : {0, 1, 2}) {
      ContextOptions options;
      options.prefetch = depth == 0 ? Prefetch::none() : Prefetch::depth(depth);
      const Outcome outcome = run(zero3("dp"), options, units);
      EXPECT_EQ(outcome.counters.peak_gathered_units, depth + 1) << units << " units, depth " << depth;
      EXPECT_EQ(outcome.counters.peak_reduce_slots, 2);
      const Bytes unit(kWidth * kWidth * 4);
      EXPECT_EQ(outcome.memory.gathered_peak, unit * (depth + 1));
      EXPECT_LE(outcome.memory.reduce_slots_peak, unit * 2);
    }
    ContextOptions delayed;
    delayed.prefetch = Prefetch::delayed_release(1);
    EXPECT_EQ(run(zero3("dp"), delayed, units).counters.peak_gathered_units, 2);
    delayed.prefetch = Prefetch::delayed_release(3);
    EXPECT_EQ(run(zero3("dp"), delayed, units).counters.peak_gathered_units, 4);
  }
}

TEST(Overlap, AByteBudgetLimitsPrefetch) {
  ContextOptions options;
  options.prefetch = Prefetch::depth(3);
  options.prefetch.budget = Bytes(kWidth * kWidth * 4 * 2);
  EXPECT_EQ(run(zero3("dp"), options, 8).counters.peak_gathered_units, 2);
}

TEST(Overlap, TheVirtualClockIsDeterministic) {
  const Outcome a = run(zero3("dp"), {}), b = run(zero3("dp"), {});
  EXPECT_EQ(a.overlap.elapsed, b.overlap.elapsed);
  EXPECT_EQ(a.overlap.exposed, b.overlap.exposed);
}

}  // namespace
}  // namespace fsdp::testing
