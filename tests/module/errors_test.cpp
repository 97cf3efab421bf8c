// Wrong use is refused with a message before anything changes; failures reach every rank, and reset() recovers.
#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <cmath>
#include <filesystem>

#include "tests/support/train.h"

namespace fsdp::testing {
namespace {

void expect_refused(const std::function<void()>& action, const std::vector<std::string>& parts) {
  try {
    action();
    ADD_FAILURE() << "not refused; expected: " << parts[0];
  } catch (const UsageError& error) {
    for (const auto& part : parts)
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos)
          << "\"" << error.what() << "\" lacks \"" << part << "\"";
  }
}

TEST(Errors, FullyShardRefusesWhatCannotWork) {
  World world = World::single();
  DeviceMesh mesh(world, {{"dp", 1}});
  auto context = FsdpContext::create(mesh);
  auto model = make_toy_model();
  expect_refused([&] { context->fully_shard(std::make_shared<torch::nn::LinearImpl>(2, 2), {}); },
                 {"LinearImpl", "has no hooks", "FSDP_MODULE"});
  expect_refused([&] { context->fully_shard(model, {.placements = zero3("nowhere")}); },
                 {"has no axis \"nowhere\"", "dp=1"});
  expect_refused([&] { context->fully_shard(model, {.gradient_divisor = 0.0}); }, {"gradient_divisor is 0"});
  expect_refused([&] { context->fully_shard(std::vector<ModuleRef>{}, {}); }, {"no module given"});
  expect_refused([&] { context->fully_shard({model->blocks[0], model->blocks[0]}, {}); }, {"given twice"});
  Strategy odd = zero3("dp");
  odd.optimizer[0] = Placement::replicate;
  expect_refused([&] { context->fully_shard(model, {.placements = odd}); }, {"flat"});
  for (auto& p : model->parameters()) EXPECT_NO_THROW((void)(p + 1));  // nothing was changed
  context->fully_shard(model, {});
  expect_refused([&] { context->fully_shard(model, {}); }, {"is a unit already"});
  expect_refused([&] { context->fully_shard(model->blocks[0], {}); },
                 {"already belongs to unit", "children units before their parents"});
  auto other = FsdpContext::create(mesh);
  expect_refused([&] { other->fully_shard(model, {}); }, {"unit of another context"});
  (void)toy_loss(model, 1);
  auto late = make_toy_model();
  expect_refused([&] { context->fully_shard(late, {}); }, {"after the first forward"});
  expect_refused([&] { (void)context->unit("nope"); }, {"no unit \"nope\"", "<root>"});
  expect_refused([&] { (void)context->full_parameter("nope"); }, {"no parameter \"nope\""});
  auto empty = FsdpContext::create(mesh);
  expect_refused([&] { empty->finalize(); }, {"no units"});
}

TEST(Errors, TiedWeightsThatCannotBeServedAreRefusedByName) {
  DeviceMesh mesh(World::single(), {{"dp", 1}});
  const auto tied = [] {
    auto model = make_toy_model();
    auto* second = model->blocks[1]->as<ToyBlockImpl>();
    second->up = second->replace_module("up", model->blocks[0]->as<ToyBlockImpl>()->up);
    return model;
  };
  auto driven = FsdpContext::create(mesh);
  auto model = tied();
  driven->fully_shard(model->blocks[0], {.register_hooks = false});
  expect_refused([&] { driven->fully_shard(model->blocks[1], {.register_hooks = false}); },
                 {"\"up.weight\" is tied to \"up.weight\" of unit 0", "untie them in a caller-driven schedule"});
  auto dtypes = FsdpContext::create(mesh);
  auto other = tied();
  dtypes->fully_shard(other->blocks[0], {});
  expect_refused([&] { dtypes->fully_shard(other->blocks[1], {.mixed_precision = {.param_dtype = at::kBFloat16}}); },
                 {"computes in Float", "policy says BFloat16", "agree on param_dtype"});
  dtypes->fully_shard(other->blocks[1], {});
}

TEST(Errors, AnExceptionInForwardOnOneRankReachesTheOthersAndResetRecovers) {
  run_ranks(2,
            [](World world) {
              auto context = FsdpContext::create(DeviceMesh(world, {{"dp", 2}}));
              auto model = make_toy_model();
              shard_toy_model(*context, model, {});
              toy_loss(model, 1).backward();
              const auto expected = context->full_gradient("blocks.1.up.weight");
              const bool failing = world.rank().value() == 1;
              bool threw = false;
              try {
                const auto x =
                    failing ? random({4, kToyInputs + 1}, 1) : random({4, kToyInputs}, 1);  // wrong width on one rank
                model->forward(x).sum().backward();
              } catch (const std::exception&) {
                threw = true;
                context->reset();
              }
              EXPECT_TRUE(threw) << "rank " << world.rank().value();
              toy_loss(model, 1).backward();
              EXPECT_TRUE(at::equal(context->full_gradient("blocks.1.up.weight"), expected));
            },
            {.deadline = std::chrono::seconds(30)});
}

struct BombImpl : torch::nn::Module {
  BombImpl() { weight = register_parameter("weight", at::ones({4})); }
  at::Tensor forward(at::Tensor x, bool armed) {
    auto y = x * weight;
    if (armed) y.register_hook([](at::Tensor) -> at::Tensor { throw std::runtime_error("bomb"); });
    return y * 1;  // the unit's backward has begun when the bomb goes off
  }
  at::Tensor weight;
};
FSDP_MODULE(Bomb);

TEST(Errors, AnExceptionInBackwardIsFollowedByAdviceAndResetRecovers) {
  run_ranks(2,
            [](World world) {
              auto context = FsdpContext::create(DeviceMesh(world, {{"dp", 2}}));
              Bomb model;
              context->fully_shard(model, {});
              EXPECT_THROW(model->forward(at::ones({4}), true).sum().backward(), std::runtime_error);
              expect_refused([&] { (void)model->forward(at::ones({4}), false); },
                             {"previous backward ended with an exception", "context->reset()"});
              context->reset();
              model->forward(at::ones({4}), false).sum().backward();
              EXPECT_TRUE(at::equal(context->full_gradient("weight"), at::ones({4})));
            },
            {.deadline = std::chrono::seconds(30)});
}

TEST(Errors, RanksThatRunDifferentUnitsFailWithBothNames) {
  std::string message;
  std::mutex mutex;
  EXPECT_THROW(
      run_ranks(2,
                [&](World world) {
                  auto context = FsdpContext::create(DeviceMesh(world, {{"dp", 2}}), {.prefetch = Prefetch::none()});
                  auto model = make_toy_model();
                  for (auto& block : *model->blocks) context->fully_shard(block, {});
                  const std::size_t chosen = world.rank().value() == 0 ? 0 : 1;
                  try {
                    (void)model->blocks[chosen]->as<fsdp::Hooked<ToyBlockImpl>>()->forward(random({2, 7}, 1));
                    (void)context->memory_report();
                  } catch (const CommunicationError& error) {
                    std::lock_guard lock(mutex);
                    message = error.what();
                    throw;
                  }
                },
                {.deadline = std::chrono::seconds(30)}),
      CommunicationError);
  EXPECT_NE(message.find("FSDP:<root>:unshard"), std::string::npos) << message;
  EXPECT_NE(message.find("FSDP:#1/<root>:unshard"), std::string::npos) << message;
}

TEST(Errors, ARankThatLeavesEndsTheOthersAtOnce) {
  try {
    run_ranks(2,
              [](World world) {
                auto context = FsdpContext::create(DeviceMesh(world, {{"dp", 2}}));
                auto model = make_toy_model();
                shard_toy_model(*context, model, {});
                if (world.rank().value() == 1) return;  // never joins the first gather
                toy_loss(model, 1).backward();
              },
              {.deadline = std::chrono::minutes(10)});
    ADD_FAILURE() << "no error";
  } catch (const CommunicationError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("a rank has ended; missing ranks: 1"), std::string::npos) << text;
    EXPECT_NE(text.find("FSDP:<root>:unshard"), std::string::npos) << text;
  }
}

TEST(Errors, StepsOverUnreducedMicrobatchesAreRefusedAndZeroGradDropsThem) {
  run_toy(2,
          [](ToyRank& r) {
            Sgd optimizer(*r.context, {});
            {
              auto scope = r.context->no_sync();
              toy_loss(r.model, 1).backward();
            }
            expect_refused([&] { (void)grad_norm(*r.context); },
                           {"grad_norm", "unit \"blocks.0\"", "not reduced", "is_last"});
            expect_refused([&] { optimizer.step(); }, {"optimizer step"});
            optimizer.zero_grad();
            toy_loss(r.model, 5).backward();
            auto reference = make_toy_model();
            toy_loss(reference, 5).backward();
            EXPECT_TRUE(at::allclose(r.context->full_gradient("blocks.0.gain"),
                                     reference->blocks[0]->as<ToyBlockImpl>()->gain.grad(), 1e-5, 1e-6));
          },
          {}, {.placements = zero1("dp")});
}

TEST(Errors, ParametersReplacedAfterShardingAreNamed) {
  run_ranks(1, [](World world) {
    auto context = FsdpContext::create(DeviceMesh(world, {{"dp", 1}}));
    auto replaced = make_toy_model();
    shard_toy_model(*context, replaced, {.placements = ddp("dp")});
    replaced->to(at::kDouble);
    expect_refused([&] { (void)toy_loss(replaced, 1); },
                   {"no longer is the tensor that was sharded", "MixedPrecisionPolicy"});
  });
}

TEST(Errors, GradientsOfParametersThatWereFrozenAtTheForwardAreRefused) {
  run_ranks(1, [](World world) {
    auto context = FsdpContext::create(DeviceMesh(world, {{"dp", 1}}));
    auto model = make_toy_model();
    for (auto& p : model->blocks[0]->parameters()) p.set_requires_grad(false);
    shard_toy_model(*context, model, {.placements = ddp("dp")});
    (void)toy_loss(model, 1);
    auto* block = model->blocks[0]->as<ToyBlockImpl>();
    block->gain.set_requires_grad(true);
    expect_refused(
        [&] { (block->gain * 2).sum().backward(); },
        {"\"blocks.0.gain\" of unit \"blocks.0\" received a gradient", "frozen when the last forward began"});
  });
}

TEST(Errors, RanksThatShardDifferentParametersAreRefused) {
  run_ranks(2, [](World world) {
    auto context = FsdpContext::create(DeviceMesh(world, {{"dp", 2}}));
    ToyBlock block(world.rank().value() == 0 ? 7 : 6, 19);  // packed to equal lengths
    expect_refused([&] { context->fully_shard(block, {}); }, {"shard different parameters", "mesh axis \"dp\""});
  });
}

TEST(Errors, NumbersThatCannotBeMeantAreRefused) {
  run_toy(1, [](ToyRank& r) {
    toy_loss(r.model, 1).backward();
    for (double norm : {-1.0, 0.0, std::nan("")})
      expect_refused([&] { clip_grad_norm_(*r.context, norm); }, {"max_norm"});
    expect_refused([&] { AdamW(*r.context, {.learning_rate = std::nan("")}); }, {"learning rate is nan"});
    expect_refused([&] { Sgd(*r.context, {}).set_learning_rate(-1); }, {"learning rate is -1"});
  });
}

TEST(Errors, AnOptimizerWhoseContextIsGoneSaysSo) {
  run_ranks(1, [](World world) {
    std::unique_ptr<Sgd> optimizer;
    {
      ToyRank rank(world);
      optimizer = std::make_unique<Sgd>(*rank.context, SgdOptions{});
    }
    expect_refused([&] { optimizer->step(); }, {"FsdpContext of this optimizer was destroyed"});
  });
}

TEST(Errors, FiftyContextsLeaveNoThreadBehind) {
  const auto threads = [] {
    int count = 0;
    for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) ++count;
    return count;
  };
  World world = World::single();
  int after_first = 0;
  for (int i = 0; i < 50; ++i) {
    {
      auto context = FsdpContext::create(DeviceMesh(world, {{"dp", 1}}));
      auto model = make_toy_model();
      shard_toy_model(*context, model, {});
      toy_loss(model, 1).backward();
    }
    if (i == 0) after_first = threads();
  }
  EXPECT_EQ(threads(), after_first);
}

}  // namespace
}  // namespace fsdp::testing
