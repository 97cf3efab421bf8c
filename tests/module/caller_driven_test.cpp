// Units without hooks, driven by an outside schedule.
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include "tests/support/train.h"

namespace fsdp::testing {
namespace {

TEST(CallerDriven, SchedulesEqualAutomaticOnes) {
  run_ranks(2, [](World world) {
    DeviceMesh mesh(world, {{"dp", 2}});
    auto automatic = FsdpContext::create(mesh);
    auto driven = FsdpContext::create(mesh);
    auto model_a = make_toy_model(), model_d = make_toy_model();
    shard_toy_model(*automatic, model_a, {});
    shard_toy_model(*driven, model_d, {.register_hooks = false});
    std::vector<std::string> order;
    for (const auto& unit : driven->units()) {
      unit->register_post_backward_hook([&](FsdpModule& u) {
        u.reshard();
        u.reduce_gradients();
        order.push_back(u.name());
      });
      unit->register_post_backward_hook([&](FsdpModule& u) { order.push_back("then " + u.name()); });
    }
    const int rank = static_cast<int>(world.rank().value());
    for (int step = 0; step < 2; ++step) {
      for (int m = 0; m < 2; ++m) {
        auto scope_a = automatic->microbatch({.is_last = m == 1});
        auto scope_d = driven->microbatch({.is_last = m == 1});
        toy_loss(model_a, 10 * m + rank).backward();
        for (const auto& unit : driven->units()) unit->unshard();  // in any order, before their first use
        model_d->loss(random({4, kToyInputs}, 10 * m + rank), random({4, 3}, 10 * m + rank + 1)).backward();
        if (m == 1) driven->finish_grad_sync();
      }
      EXPECT_EQ(driven->counters().reductions, 4 * 2 * (step + 1));
      for (auto& [name, leaf] : automatic->named_parameters()) {
        EXPECT_TRUE(at::equal(automatic->full_gradient(name), driven->full_gradient(name))) << name;
      }
      for (auto* context : {automatic.get(), driven.get()}) {
        at::NoGradGuard no_grad;
        for (auto& p : context->parameters()) {
          p.add_(p.grad(), -0.1);
          p.mutable_grad().reset();
        }
      }
    }
    ASSERT_GE(order.size(), 2u);
    EXPECT_EQ(order[1], "then " + order[0]);
    for (const auto& unit : driven->units()) EXPECT_FALSE(unit->gathered());
  });
}

TEST(CallerDriven, FinishGradSyncNamesUnitsWithHalfTheirGradients) {
  run_ranks(1, [](World world) {
    auto context = FsdpContext::create(DeviceMesh(world, {{"dp", 1}}));
    auto model = make_toy_model();
    shard_toy_model(*context, model, {.register_hooks = false});
    context->finalize();
    for (const auto& unit : context->units()) unit->unshard();
    auto* block = model->blocks[0]->as<ToyBlockImpl>();
    (random({2, 7}, 1) * block->gain).sum().backward();  // one of six parameters
    try {
      context->finish_grad_sync();
      ADD_FAILURE() << "no error";
    } catch (const UsageError& error) {
      EXPECT_NE(std::string(error.what()).find("unit \"blocks.0\" still waits for 5 of 6 gradients"), std::string::npos)
          << error.what();
    }
    context->reset();
    for (const auto& unit : context->units()) unit->unshard();
    model->forward(random({2, kToyInputs}, 1)).sum().backward();  // complete, but nobody reduces
    EXPECT_THROW(context->finish_grad_sync(), UsageError);
  });
}

TEST(CallerDriven, UnitsLeftGatheredByACallerAreNamedAtTheEndOfTheStep) {
  run_ranks(1, [](World world) {
    auto context = FsdpContext::create(DeviceMesh(world, {{"dp", 1}}));
    auto model = make_toy_model();
    shard_toy_model(*context, model, {.register_hooks = false});
    for (const auto& unit : context->units()) {
      unit->register_post_backward_hook([](FsdpModule& u) {
        if (u.name() != "blocks.1") u.reshard();
        u.reduce_gradients();
      });
    }
    for (const auto& unit : context->units()) unit->unshard();
    model->loss(random({4, kToyInputs}, 1), random({4, 3}, 2)).backward();
    try {
      context->finish_grad_sync();
      ADD_FAILURE() << "no error";
    } catch (const UsageError& error) {
      EXPECT_NE(std::string(error.what()).find("unit \"blocks.1\" is still gathered"), std::string::npos)
          << error.what();
    }
    context->unit("blocks.1").reshard();
    context->finish_grad_sync();
  });
}

}  // namespace
}  // namespace fsdp::testing
