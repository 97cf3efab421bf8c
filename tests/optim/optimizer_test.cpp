// The fused optimizers and clipping against torch's on whole tensors.
#include <ATen/ops/allclose.h>
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>

#include <limits>

#include "tests/support/train.h"

namespace fsdp::testing {
namespace {

bool decays(const std::string& name) { return name.ends_with("weight"); }

TEST(ShardedOptimizer, WeightDecayGroupsAndLearningRateScalesEqualTorchParameterGroups) {
  auto reference = make_toy_model();
  std::vector<at::Tensor> decayed, others;
  for (auto& item : reference->named_parameters()) (decays(item.key()) ? decayed : others).push_back(item.value());
  torch::optim::AdamW torch_optimizer(
      {torch::optim::OptimizerParamGroup(
           decayed, std::make_unique<torch::optim::AdamWOptions>(torch::optim::AdamWOptions(0.01).weight_decay(0.3))),
       torch::optim::OptimizerParamGroup(
           others, std::make_unique<torch::optim::AdamWOptions>(torch::optim::AdamWOptions(0.02).weight_decay(0.0)))},
      torch::optim::AdamWOptions(0.01));
  for (int step = 0; step < 5; ++step) {
    torch_optimizer.zero_grad();
    toy_loss(reference, step).backward();
    torch_optimizer.step();
  }
  for (int ranks : {1, 2, 3}) {
    run_toy(ranks, [&](ToyRank& r) {
      AdamW optimizer(*r.context, {.learning_rate = 0.01, .weight_decay = 0.3},
                      [](const std::string& name, at::IntArrayRef) {
                        return decays(name) ? ParameterOptions{}
                                            : ParameterOptions{.learning_rate_scale = 2.0, .weight_decay = 0.0};
                      });
      for (int step = 0; step < 5; ++step) {
        toy_loss(r.model, step).backward();
        optimizer.step();
        optimizer.zero_grad();
      }
      for (auto& item : reference->named_parameters()) {
        EXPECT_TRUE(at::allclose(r.context->full_parameter(item.key()), item.value(), 1e-5, 1e-6))
            << item.key() << " on " << ranks << " ranks";
      }
      Bytes state;
      for (auto& leaf : r.context->parameters()) state += Bytes(2 * static_cast<std::int64_t>(leaf.nbytes()));
      EXPECT_GE(optimizer.state_bytes(), state);
    });
  }
}

TEST(ShardedOptimizer, AnUnusedParameterIsLeftAloneAndKeepsItsOwnStepCount) {
  struct TwoImpl : torch::nn::Module {
    TwoImpl() {
      a = register_parameter("a", at::ones({5}));
      b = register_parameter("b", at::ones({5}));
    }
    at::Tensor forward(at::Tensor x, bool both) { return both ? (x * a * b).sum() : (x * a).sum(); }
    at::Tensor a, b;
  };
  TwoImpl reference;
  torch::optim::AdamW torch_optimizer(reference.parameters(), torch::optim::AdamWOptions(0.1));
  run_ranks(1, [&](World world) {
    auto context = FsdpContext::create(DeviceMesh(world, {{"dp", 1}}));
    auto model = std::make_shared<Hooked<TwoImpl>>();
    context->fully_shard(model, {});
    AdamW optimizer(*context, {.learning_rate = 0.1});
    for (int step = 0; step < 4; ++step) {
      const bool both = step % 2 == 0;
      torch_optimizer.zero_grad();
      reference.forward(random({5}, step), both).backward();
      torch_optimizer.step();
      model->forward(random({5}, step), both).backward();
      optimizer.step();
      optimizer.zero_grad();
    }
    EXPECT_TRUE(at::allclose(context->full_parameter("a"), reference.a));
    EXPECT_TRUE(at::allclose(context->full_parameter("b"), reference.b));
  });
}

TEST(ShardedOptimizer, ANormThatIsNotFiniteSkipsTheStepOnEveryRankAndIsCounted) {
  run_toy(2, [](ToyRank& r) {
    AdamW optimizer(*r.context, {});
    toy_loss(r.model, 1).backward();
    if (r.rank == 1) {
      for (auto& leaf : r.context->parameters()) leaf.mutable_grad().fill_(std::numeric_limits<float>::infinity());
    }
    const auto before = r.context->full_parameter("blocks.1.up.weight");
    const auto norm = clip_grad_norm_(*r.context, 1.0);
    EXPECT_FALSE(std::isfinite(norm.item<double>()));
    optimizer.step(norm);
    EXPECT_TRUE(at::equal(r.context->full_parameter("blocks.1.up.weight"), before));
    EXPECT_EQ(optimizer.skipped_steps(), 1);
    optimizer.zero_grad();
    toy_loss(r.model, 1).backward();
    optimizer.step(clip_grad_norm_(*r.context, 1.0));
    EXPECT_EQ(optimizer.skipped_steps(), 1);
    EXPECT_FALSE(at::equal(r.context->full_parameter("blocks.1.up.weight"), before));
  });
}

TEST(ShardedOptimizer, AStepThatClipsEqualsClippingBefore) {
  for (const bool adamw : {true, false}) {
    run_toy(2, [&](ToyRank& r) {
      ToyRank other(r.context->mesh().world());
      const auto make = [&](FsdpContext& context) -> std::unique_ptr<ShardedOptimizer> {
        if (adamw) return std::make_unique<AdamW>(context, AdamWOptions{.learning_rate = 0.01});
        return std::make_unique<Sgd>(context, SgdOptions{.learning_rate = 0.1, .momentum = 0.5});
      };
      const auto before = make(*r.context), within = make(*other.context);
      for (int step = 0; step < 3; ++step) {
        toy_loss(r.model, step).backward();
        before->step(clip_grad_norm_(*r.context, 0.01));
        before->zero_grad();
        toy_loss(other.model, step).backward();
        within->step(grad_norm(*other.context), 0.01);
        within->zero_grad();
      }
      for (const auto& [name, leaf] : r.context->named_parameters())
        EXPECT_TRUE(at::equal(r.context->full_parameter(name), other.context->full_parameter(name))) << name;
      EXPECT_THROW(within->step(std::nullopt, 1.0), UsageError);
    });
  }
}

TEST(ClipGradNorm, CountsEveryElementOnceHoweverItIsPlaced) {
  auto reference = make_toy_model();
  toy_loss(reference, 1).backward();
  double squares = 0;
  for (auto& p : reference->parameters()) squares += p.grad().to(at::kDouble).square().sum().item<double>();
  const double expected = std::sqrt(squares);
  for (int outer : {1, 2}) {
    for (const Strategy& strategy : {ddp({"outer", "inner"}), zero1({"outer", "inner"}), zero2({"outer", "inner"}),
                                     zero3({"outer", "inner"}), hsdp("outer", "inner"), hfsdp("outer", "inner")}) {
      run_ranks(2 * outer, [&](World world) {
        auto context = FsdpContext::create(DeviceMesh(world, {{"outer", outer}, {"inner", 2}}));
        auto model = make_toy_model();
        shard_toy_model(*context, model, {.placements = strategy});
        toy_loss(model, 1).backward();
        EXPECT_NEAR(grad_norm(*context).item<double>(), expected, 1e-5 * expected) << strategy.name;
        const auto before = context->full_gradient("blocks.0.up.weight");
        const auto norm = clip_grad_norm_(*context, expected / 2);
        EXPECT_NEAR(norm.item<double>(), expected, 1e-5 * expected);
        EXPECT_TRUE(at::allclose(context->full_gradient("blocks.0.up.weight"), before * 0.5, 1e-4, 1e-7))
            << strategy.name;
        EXPECT_NEAR(clip_grad_norm_(*context, 1e9).item<double>(), expected / 2,
                    1e-4 * expected);  // already below: unchanged
      });
    }
  }
}

}  // namespace
}  // namespace fsdp::testing
