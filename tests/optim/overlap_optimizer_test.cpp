// Optimizers that begin while gradients are still reduced: same values, earlier.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <string_view>

#include "tests/support/stack_model.h"
#include "tests/support/train.h"

namespace fsdp::testing {
namespace {

std::vector<at::Tensor> train(World world, bool overlap, const Strategy& strategy, bool own_adamw, double clip,
                              bool unify, int skipped) {
  ContextOptions options;
  options.overlap_optimizer = overlap;
  options.unify_communication_stream = unify;
  ToyRank r(world, options, {.placements = strategy});
  std::unique_ptr<ShardedOptimizer> optimizer;
  if (own_adamw)
    optimizer = std::make_unique<AdamW>(*r.context, AdamWOptions{.learning_rate = 0.01});
  else
    optimizer = std::make_unique<Sgd>(*r.context, SgdOptions{.learning_rate = 0.1, .momentum = 0.9});
  for (int step = 0; step < 3; ++step) {
    for (int m = 0; m < 2; ++m) {
      auto scope = r.context->microbatch({.is_last = m == 1});
      auto loss = toy_loss(r.model, static_cast<std::uint64_t>(100 * step + 10 * m + r.rank));
      if (skipped == r.rank) loss = loss * 0;
      loss.backward();
    }
    if (clip > 0)
      optimizer->step(clip_grad_norm_(*r.context, clip));
    else
      optimizer->step();
    EXPECT_TRUE(r.context->units_being_reduced().empty());
    optimizer->zero_grad();
  }
  std::vector<at::Tensor> weights;
  for (auto& [name, leaf] : r.context->named_parameters()) weights.push_back(r.context->full_parameter(name));
  return weights;
}

TEST(OverlapOptimizer, GivesTheSameBits) {
  for (const int ranks : {1, 2, 3}) {
    for (const auto& strategy : {zero3("dp"), zero1("dp")}) {
      for (const bool own_adamw : {true, false}) {
        for (const double clip : {0.0, 0.5}) {
          for (const bool unify : {false, true}) {
            run_ranks(ranks, [&](World world) {
              const auto expected = train(world, false, strategy, own_adamw, clip, unify, -1);
              const auto got = train(world, true, strategy, own_adamw, clip, unify, -1);
              for (std::size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(at::equal(got[i], expected[i])) << i;
            });
          }
        }
      }
    }
  }
}

TEST(OverlapOptimizer, UnitsAreUpdatedWhileLaterOnesAreReduced) {
  constexpr int kRanks = 4, kUnits = 4;
  constexpr std::int64_t kWidth = 2048, kBatch = 1024;  // reductions take longer than the backward of a unit
  const auto run = [&](bool overlap) {
    auto world = World::simulated(kRanks);
    ContextOptions options;
    options.overlap_optimizer = overlap;
    options.recorder = std::make_shared<trace::Recorder>();
    auto context = FsdpContext::create(DeviceMesh(world, {{"dp", kRanks}}), options);
    Stack model(kUnits, kWidth);
    shard_stack(*context, model, {});
    AdamW optimizer(*context, {});
    trace::Nanoseconds first_update = 0, last_reduction = 0, end = 0;
    for (int step = 0; step < 2; ++step) {
      options.recorder->clear();
      model->forward(at::empty({kBatch, kWidth}, at::kMeta).set_requires_grad(true))
          .backward(at::empty({kBatch, kWidth}, at::kMeta));
      optimizer.step();
      optimizer.zero_grad();
    }
    for (const auto& span : options.recorder->spans()) {
      const std::string_view name = span.name;
      if (span.kind == trace::Kind::reduce_scatter) last_reduction = std::max(last_reduction, span.end);
      if (span.kind == trace::Kind::compute) end = std::max(end, span.end);
      if (name.find("adamw") != std::string_view::npos && first_update == 0) first_update = span.begin;
    }
    EXPECT_GT(first_update, 0);
    return std::tuple(first_update, last_reduction, end);
  };
  const auto [joined_update, joined_reduction, joined_end] = run(false);
  const auto [early_update, early_reduction, early_end] = run(true);
  EXPECT_GE(joined_update, joined_reduction);
  EXPECT_LT(early_update, early_reduction);
  EXPECT_LT(early_end, joined_end);
}

TEST(OverlapOptimizer, AnotherOptimizerThatDoesNotWaitIsRefused) {
  run_toy(2,
          [](ToyRank& r) {
            torch::optim::SGD optimizer(r.context->parameters(), torch::optim::SGDOptions(0.1));
            toy_loss(r.model, 1).backward();
            r.context->wait_for_gradients();  // as it should be
            optimizer.step();
            optimizer.zero_grad();
            toy_loss(r.model, 2).backward();
            EXPECT_FALSE(r.context->units_being_reduced().empty());
            optimizer.step();
            optimizer.zero_grad();
            try {
              static_cast<void>(toy_loss(r.model, 3));
              ADD_FAILURE() << "no error";
            } catch (const UsageError& error) {
              EXPECT_NE(std::string(error.what()).find("nobody waited for"), std::string::npos) << error.what();
            }
            r.context->reset();
          },
          {.overlap_optimizer = true});
}

TEST(OverlapOptimizer, AStepWithoutAnOptimizerStepJoinsAtTheNextForward) {
  run_toy(2,
          [](ToyRank& r) {
            const std::string name = r.context->named_parameters().front().first;
            toy_loss(r.model, 1).backward();
            const auto before = r.context->full_gradient(name);  // waits
            EXPECT_TRUE(r.context->units_being_reduced().empty());
            toy_loss(r.model, 1).backward();  // adds to it
            toy_loss(r.model, 1).backward();
            EXPECT_TRUE(at::equal(r.context->full_gradient(name), before + before + before));
            EXPECT_EQ(r.context->memory_report().reduce_slots, Bytes(0));
          },
          {.overlap_optimizer = true});
}

}  // namespace
}  // namespace fsdp::testing
