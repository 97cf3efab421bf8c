// Weight gradients computed after the rest of a backward.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include "tests/support/stack_model.h"
#include "tests/support/train.h"

namespace fsdp::testing {
namespace {

struct Block2Impl : torch::nn::Module {
  explicit Block2Impl(std::uint64_t seed)
      : up(register_module("up", fsdp::nn::Linear(6, 9))), down(register_module("down", fsdp::nn::Linear(9, 6))) {
    at::NoGradGuard no_grad;
    for (auto& p : parameters()) p.copy_(random(p.sizes(), seed++));
    gain = register_parameter("gain", random({6}, seed));
  }
  at::Tensor forward(at::Tensor x) { return x + down->forward(at::relu(up->forward(x * gain))); }
  fsdp::nn::Linear up, down;
  at::Tensor gain;
};
FSDP_MODULE(Block2);

// Two caller-driven units that reduce when their gradients are complete; `completed` lists them.
struct Driven {
  explicit Driven(World world, ReducePolicy reduce = ReducePolicy::every_microbatch)
      : context(FsdpContext::create(DeviceMesh(world, {{"dp", world.size()}}), {.reduce = reduce})) {
    for (auto& block : blocks) context->fully_shard(block, {.register_hooks = false});
    context->finalize();
    for (const auto& unit : context->units()) {
      unit->register_post_backward_hook([this](FsdpModule& u) {
        u.reshard();
        u.reduce_gradients();
        completed.push_back(u.name());
      });
    }
  }
  at::Tensor forward(std::uint64_t seed) {
    for (const auto& unit : context->units()) unit->unshard();
    auto x = random({4, 6}, seed);
    for (auto& block : blocks) x = block(x);
    return x.square().sum();
  }
  std::shared_ptr<FsdpContext> context;
  std::vector<Block2> blocks{Block2(1), Block2(50)};
  std::vector<std::string> completed;
};

void compare_gradients(Driven& a, Driven& b) {
  for (auto& [name, leaf] : a.context->named_parameters())
    EXPECT_TRUE(at::equal(a.context->full_gradient(name), b.context->full_gradient(name))) << name;
}

TEST(DelayedWeightGradients, EqualThoseOfAnOrdinaryBackward) {
  for (const int ranks : {1, 2, 3}) {
    for (const auto policy : {ReducePolicy::every_microbatch, ReducePolicy::last_microbatch}) {
      run_ranks(ranks, [&](World world) {
        Driven ordinary(world, policy), delayed(world, policy);
        const auto rank = static_cast<std::uint64_t>(world.rank().value());
        for (int step = 0; step < 2; ++step) {
          for (int m = 0; m < 3; ++m) {
            const std::uint64_t seed = 100 * static_cast<std::uint64_t>(10 * step + m) + rank;
            auto scope = ordinary.context->microbatch({.is_last = m == 2});
            auto delayed_scope = delayed.context->microbatch({.is_last = m == 2});
            ordinary.forward(seed).backward();
            DelayedWeightGradients later;
            at::Tensor loss;
            {
              auto recording = later.record();
              loss = delayed.forward(seed);
            }
            const auto before = delayed.completed.size();
            loss.backward();
            EXPECT_EQ(later.pending(), 4u);                                     // two linear maps a unit
            EXPECT_EQ(delayed.completed.size(), before);                        // nothing is complete without them
            for (const auto& unit : delayed.context->units()) unit->reshard();  // weights are not needed any more
            later.run();
            EXPECT_EQ(later.pending(), 0u);
            EXPECT_EQ(delayed.completed.size(), before + 2);
          }
          ordinary.context->finish_grad_sync();
          delayed.context->finish_grad_sync();
          compare_gradients(ordinary, delayed);
          for (auto* run : {&ordinary, &delayed}) {
            for (auto* group : run->context->groups()) group->zero_gradients(true);
          }
        }
        EXPECT_EQ(delayed.context->counters().reductions, ordinary.context->counters().reductions);
        EXPECT_EQ(delayed.completed, ordinary.completed);
      });
    }
  }
}

TEST(DelayedWeightGradients, EachScopeHasItsOwnAndNestingRestores) {
  run_ranks(1, [](World world) {
    Driven run(world);
    DelayedWeightGradients first, second;
    auto outer = first.record();
    auto x = random({4, 6}, 3);
    for (const auto& unit : run.context->units()) unit->unshard();
    x = run.blocks[0](x);
    {
      auto inner = second.record();
      x = run.blocks[1](x);
    }
    x.sum().backward();
    EXPECT_EQ(first.pending(), 2u);
    EXPECT_EQ(second.pending(), 2u);
    second.run();
    EXPECT_EQ(run.completed, std::vector<std::string>({run.context->units()[1]->name()}));
    first.drop();
    EXPECT_EQ(first.pending(), 0u);
    try {
      run.context->finish_grad_sync();
      ADD_FAILURE() << "no error";
    } catch (const UsageError& error) {
      EXPECT_NE(std::string(error.what()).find("still waits for 2 of 5 gradients"), std::string::npos) << error.what();
    }
    run.context->reset();
  });
}

TEST(DelayedWeightGradients, AreRefusedWhereTheEndOfABackwardReduces) {
  run_ranks(1, [](World world) {
    auto context = FsdpContext::create(DeviceMesh(world, {{"dp", 1}}));
    Block2 block(1);
    context->fully_shard(block);
    DelayedWeightGradients later;
    auto scope = later.record();
    try {
      block(random({4, 6}, 1));
      ADD_FAILURE() << "no error";
    } catch (const UsageError& error) {
      EXPECT_NE(std::string(error.what()).find("is not caller-driven"), std::string::npos) << error.what();
    }
    context->reset();
  });
}

TEST(DelayedWeightGradients, AreRefusedUnderCreateGraph) {
  run_ranks(1, [](World world) {
    Driven run(world);
    DelayedWeightGradients later;
    at::Tensor loss;
    {
      auto scope = later.record();
      loss = run.forward(1);
    }
    EXPECT_THROW(loss.backward({}, /*retain_graph=*/true, /*create_graph=*/true), UsageError);
    later.drop();
    run.context->reset();
  });
}

}  // namespace
}  // namespace fsdp::testing
