// fsdp::nn::Linear: equal bits, fewer copies, and every way around its short cut.
#include <ATen/ops/allclose.h>
#include <gtest/gtest.h>
#include <torch/autograd.h>
#include <torch/nn/modules/linear.h>

#include "tests/support/train.h"

namespace fsdp::testing {
namespace {

struct PairImpl : torch::nn::Module {
  PairImpl()
      : own(register_module("own", fsdp::nn::Linear(6, 5))), plain(register_module("plain", torch::nn::Linear(6, 5))) {
    at::NoGradGuard no_grad;
    plain->weight.copy_(own->weight);
    plain->bias.copy_(own->bias);
  }
  std::vector<at::Tensor> forward(at::Tensor x, at::Tensor y) { return {own->forward(x), plain->forward(y)}; }
  fsdp::nn::Linear own;
  torch::nn::Linear plain;
};
FSDP_MODULE(Pair);

void with_pair(int ranks, const std::function<void(FsdpContext&, Pair&)>& body, const UnitOptions& options = {}) {
  run_ranks(ranks, [&](World world) {
    auto context = FsdpContext::create(DeviceMesh(world, {{"dp", world.size()}}));
    Pair model;
    context->fully_shard(model, options);
    body(*context, model);
  });
}

void expect_equal_layers(FsdpContext& context) {
  EXPECT_TRUE(at::equal(context.full_gradient("own.weight"), context.full_gradient("plain.weight")));
  EXPECT_TRUE(at::equal(context.full_gradient("own.bias"), context.full_gradient("plain.bias")));
}

TEST(Linear, ForwardInputAndWeightGradientsEqualTorchBitForBit) {
  for (const std::vector<std::int64_t>& shape : std::vector<std::vector<std::int64_t>>{{3, 6}, {2, 3, 6}, {6}}) {
    with_pair(2, [&](FsdpContext& context, Pair& model) {
      auto x = random(shape, 1).requires_grad_(), y = random(shape, 1).requires_grad_();
      auto out = model->forward(x, y);
      EXPECT_TRUE(at::equal(out[0], out[1]));
      (out[0].square().sum() + out[1].square().sum()).backward();
      EXPECT_TRUE(at::equal(x.grad(), y.grad()));
      expect_equal_layers(context);
    });
  }
}

TEST(Linear, UsedTwiceInOneGraphAddsBothProducts) {
  with_pair(2, [](FsdpContext& context, Pair& model) {
    auto first = model->forward(random({3, 6}, 1), random({3, 6}, 1)),
         second = model->forward(random({4, 6}, 2), random({4, 6}, 2));
    (first[0].sum() + second[0].square().sum() + first[1].sum() + second[1].square().sum()).backward();
    EXPECT_TRUE(at::allclose(context.full_gradient("own.weight"), context.full_gradient("plain.weight"), 1e-6, 1e-6));
  });
}

TEST(Linear, AccumulatesOverMicrobatchesUnderBothPolicies) {
  for (ReducePolicy policy : {ReducePolicy::every_microbatch, ReducePolicy::last_microbatch}) {
    with_pair(2, [&](FsdpContext& context, Pair& model) {
      for (int m = 0; m < 3; ++m) {
        auto scope = context.microbatch({.is_last = m == 2, .reduce = policy});
        auto out = model->forward(random({3, 6}, m), random({3, 6}, m));
        (out[0].square().sum() + out[1].square().sum()).backward();
      }
      expect_equal_layers(context);
    });
  }
}

TEST(Linear, LowPrecisionComputeWithWideReduction) {
  with_pair(2,
            [](FsdpContext& context, Pair& model) {
              auto out = model->forward(random({3, 6}, 1), random({3, 6}, 1));
              EXPECT_EQ(out[0].scalar_type(), at::kBFloat16);
              (out[0].square().sum() + out[1].square().sum()).backward();
              expect_equal_layers(context);
              EXPECT_EQ(context.full_gradient("own.weight").scalar_type(), at::kFloat);
            },
            {.mixed_precision = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}});
}

TEST(Linear, CreateGraphTakesTheDifferentiablePath) {
  with_pair(1, [](FsdpContext& context, Pair& model) {
    auto x = random({3, 6}, 1).requires_grad_(), y = random({3, 6}, 1).requires_grad_();
    auto out = model->forward(x, y);
    auto scope = context.unshard_scope(context.unit("<root>"));
    at::Tensor second[2];
    for (int k = 0; k < 2; ++k) {
      const auto input = k == 0 ? x : y;
      const auto gradient =
          torch::autograd::grad({out[k].pow(3).sum()}, {input}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
      second[k] = torch::autograd::grad({gradient.sum()}, {input})[0];
    }
    EXPECT_TRUE(at::equal(second[0], second[1]));
  });
}

TEST(Linear, AutogradGradReturnsTheWeightGradientByValue) {
  with_pair(1, [](FsdpContext& context, Pair& model) {
    auto out = model->forward(random({3, 6}, 1), random({3, 6}, 1));
    auto gradients = torch::autograd::grad({out[0].sum() + out[1].sum()}, {model->own->weight, model->plain->weight});
    EXPECT_TRUE(at::equal(gradients[0], gradients[1]));
    for (auto& leaf : context.parameters()) EXPECT_FALSE(leaf.grad().defined());
  });
}

TEST(Linear, WithoutAContextItIsTheTorchLayer) {
  Pair model;
  auto out = model->forward(random({3, 6}, 1), random({3, 6}, 1));
  (out[0].sum() + out[1].sum()).backward();
  EXPECT_TRUE(at::equal(model->own->weight.grad(), model->plain->weight.grad()));
}

TEST(Linear, ConvertSharesTheParametersOfTheOldLayer) {
  torch::nn::Linear old(4, 3);
  auto converted = fsdp::nn::convert(old);
  EXPECT_TRUE(converted->weight.is_same(old->weight));
  EXPECT_TRUE(converted->bias.is_same(old->bias));
  EXPECT_EQ(converted->named_parameters().size(), 2u);
  EXPECT_TRUE(converted->named_parameters()["weight"].is_same(old->weight));
  const auto x = random({2, 4}, 1);
  EXPECT_TRUE(at::equal(converted->forward(x), old->forward(x)));
}

}  // namespace
}  // namespace fsdp::testing
