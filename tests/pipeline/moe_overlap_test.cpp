// What the merged schedule hides, exactly, on the virtual clock: rank 0 of a world whose ranks exchange tokens.
#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

#include "fsdp/fsdp.h"
#include "fsdp/pipeline/step_driver.h"
#include "fsdp/trace/overlap.h"
#include "models/moe_transformer.h"

namespace fsdp::testing {
namespace {

using pipeline::Schedule;

struct Outcome {
  trace::OverlapReport report;
  trace::Nanoseconds exchange = 0, exchange_hidden = 0;  // duration of all exchanges, and of that under compute
  int exchanges = 0, exchanges_hidden = 0;               // at least 90 % of it
  std::int64_t gathers = 0, peak_gathered_units = 0;
};

Outcome run(int microbatches, const pipeline::StepOptions& options) {
  CostModel costs;
  costs.link_bytes_per_second = 100e9;
  costs.collective_latency = 5'000;
  auto world = World::simulated(8, costs);
  DeviceMesh mesh(world, {{"edp", 2}, {"ep", 4}});
  models::MoeConfig config;
  config.base = {.vocabulary = 1024,
                 .layers = 4,
                 .width = 2048,
                 .heads = 16,
                 .kv_heads = 16,
                 .ffn_width = 4096,
                 .max_context = 4096};
  config.experts = 16;
  config.top_k = 2;
  config.expert_width = 2048;
  config.shared_width = 2048;
  auto model = std::make_shared<models::MoeTransformer>(config, mesh);
  auto recorder = std::make_shared<trace::Recorder>();
  auto context = FsdpContext::create(mesh, {.recorder = recorder});
  UnitOptions unit;
  unit.mixed_precision.param_dtype = at::kBFloat16;
  model->shard(*context, unit);
  context->finalize();
  pipeline::StepDriver driver(context, model, options);
  Outcome outcome;
  for (int step = 0; step < 2; ++step) {
    recorder->clear();
    context->reset_peaks();
    const auto gathers_before = context->counters().unshards;
    std::vector<pipeline::Microbatch> data;
    for (int m = 0; m < microbatches; ++m) {
      const auto tokens = at::empty({1, 4096}, at::TensorOptions().dtype(at::kLong).device(at::kMeta));
      data.push_back({{tokens}, {tokens}});
    }
    driver.run(std::move(data));
    outcome.gathers = context->counters().unshards - gathers_before;
    for (auto* group : context->groups()) group->zero_gradients(true);
  }
  outcome.peak_gathered_units = context->counters().peak_gathered_units;
  outcome.report = trace::overlap_report(recorder->spans());
  for (const auto& collective : outcome.report.collectives) {
    if (collective.span.kind != trace::Kind::all_to_all) continue;
    ++outcome.exchanges;
    outcome.exchanges_hidden += collective.overlapped() ? 1 : 0;
    outcome.exchange += collective.duration();
    outcome.exchange_hidden += collective.hidden;
  }
  return outcome;
}

double share_hidden(const Outcome& outcome) {
  return static_cast<double>(outcome.exchange_hidden) / static_cast<double>(outcome.exchange);
}

// The exchanges of the first forward and the last backward have no partner: they are what one microbatch alone exposes.
TEST(MoeOverlap, OnlyFillAndDrainAreExposed) {
  for (const bool early : {false, true}) {
    const Outcome alone = run(1, {.release_early = early});
    for (const int microbatches : {4, 8}) {
      SCOPED_TRACE(microbatches);
      const Outcome merged = run(microbatches, {.release_early = early});
      EXPECT_EQ(merged.exchanges, 4 * 6 * microbatches);
      EXPECT_LE(static_cast<double>(merged.report.exposed), 1.1 * static_cast<double>(alone.report.exposed))
          << trace::to_string(merged.report);
      // Inside merged steps at least nine tenths are hidden.
      const auto inside = merged.exchange - alone.exchange;
      EXPECT_GE(static_cast<double>(merged.exchange_hidden - alone.exchange_hidden), 0.9 * static_cast<double>(inside));
    }
  }
}

TEST(MoeOverlap, TheSequentialScheduleHidesNoExchange) {
  const Outcome alone = run(1, {}), sequential = run(4, {.schedule = Schedule::sequential, .delay_weights = false}),
                merged = run(4, {});
  EXPECT_LT(share_hidden(sequential), 0.2);
  EXPECT_GT(share_hidden(merged), 0.7);
  EXPECT_GT(sequential.report.exposed, 3 * alone.report.exposed);
  EXPECT_LT(merged.report.elapsed, sequential.report.elapsed);
}

TEST(MoeOverlap, GatheringAheadHidesTheGathersOfMergedSteps) {
  const Outcome ahead = run(4, {}), demand = run(4, {.gather_ahead = 0});
  EXPECT_LT(ahead.gathers, demand.gathers);
  EXPECT_LT(ahead.report.exposed, demand.report.exposed);
  EXPECT_LE(ahead.peak_gathered_units, 4);  // three, and the root's
  // Exposed are no more than those of the first forward and the last backward, whose first unit was kept where it
  // follows its own forward.
  const auto exposed = [](const Outcome& outcome) {
    return outcome.report.count(trace::Kind::all_gather) - outcome.report.overlapped(trace::Kind::all_gather);
  };
  EXPECT_LE(exposed(ahead), exposed(run(1, {})) + 2) << trace::to_string(ahead.report);
}

TEST(MoeOverlap, DelayedWeightGradientsHideMore) {
  const Outcome with = run(6, {}), without = run(6, {.delay_weights = false});
  EXPECT_LE(with.report.exposed, without.report.exposed);
}

}  // namespace
}  // namespace fsdp::testing
