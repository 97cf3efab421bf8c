// What a user holds and what a unit does over its life.
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/optim/sgd.h>

#include <map>

#include "tests/support/stack_model.h"
#include "tests/support/train.h"

namespace fsdp::testing {
namespace {

TEST(Lifecycle, ModuleTensorsAndLeavesStayTheSameObjects) {
  run_toy(2, [](ToyRank& r) {
    std::vector<const void*> modules, leaves;
    for (auto& p : r.model->parameters()) modules.push_back(p.unsafeGetTensorImpl());
    for (auto& p : r.context->parameters()) leaves.push_back(p.unsafeGetTensorImpl());
    for (int step = 0; step < 2; ++step) {
      toy_loss(r.model, 1).backward();
      at::NoGradGuard no_grad;
      (void)toy_loss(r.model, 2);
    }
    std::size_t i = 0, k = 0;
    for (auto& p : r.model->parameters()) EXPECT_EQ(p.unsafeGetTensorImpl(), modules[i++]);
    for (auto& p : r.context->parameters()) EXPECT_EQ(p.unsafeGetTensorImpl(), leaves[k++]);
    for (auto& item : r.model->named_parameters()) EXPECT_FALSE(item.value().grad().defined()) << item.key();
    EXPECT_EQ(r.model->blocks[0]->as<ToyBlockImpl>()->up->weight.sizes(), (std::vector<std::int64_t>{19, 7}));
  });
}

TEST(Lifecycle, LeavesOfAllRanksHoldEveryElementOnce) {
  run_toy(3, [](ToyRank& r) {
    std::map<std::string, std::int64_t> whole;
    for (auto& item : r.model->named_parameters()) whole[item.key()] = item.value().numel();
    for (auto& [name, leaf] : r.context->named_parameters()) {
      ASSERT_TRUE(whole.contains(name)) << name;
      EXPECT_LE(leaf.numel(), whole[name]);
      EXPECT_EQ(leaf.dim(), 1);
    }
  });
}

TEST(Lifecycle, ReadingAReleasedWeightThrowsWithUnitParametersAndAdvice) {
  run_toy(2, [](ToyRank& r) {
    toy_loss(r.model, 1).backward();
    auto* block = r.model->blocks[1]->as<ToyBlockImpl>();
    try {
      (void)(block->gain + 1);
      ADD_FAILURE() << "no error";
    } catch (const std::exception& error) {
      const std::string text = error.what();
      EXPECT_NE(text.find("blocks.1"), std::string::npos) << text;
      EXPECT_NE(text.find("blocks.1.gain"), std::string::npos) << text;
      EXPECT_NE(text.find("fsdp::call"), std::string::npos) << text;
    }
    EXPECT_ANY_THROW((void)block->forward(random({2, 7}, 1)));  // through the base type: no hooks
    auto scope = r.context->unshard_scope(r.context->unit("blocks.1"));
    EXPECT_NO_THROW((void)(block->gain + 1));
  });
}

TEST(Lifecycle, WeightsReadInAScopeAreTheOptimizersLatest) {
  for (const Strategy& strategy : {zero1("dp"), zero3("dp")}) {
    run_toy(2,
            [](ToyRank& r) {
              Sgd optimizer(*r.context, {.learning_rate = 1.0});
              toy_loss(r.model, 1).backward();
              optimizer.step();
              auto scope = r.context->unshard_scope(r.context->unit("blocks.0"));
              const auto latest = r.context->full_parameter("blocks.0.up.weight").to(at::kBFloat16);
              EXPECT_TRUE(at::equal(r.model->blocks[0]->as<ToyBlockImpl>()->up->weight, latest));
            },
            {}, {.placements = strategy, .mixed_precision = {.param_dtype = at::kBFloat16}});
  }
}

TEST(Lifecycle, AForwardWithoutBackwardBeforeTheStepDoesNotLeaveWeightsStale) {
  for (const Strategy& strategy : {ddp("dp"), zero1("dp"), zero2("dp"), zero3("dp")}) {
    for (bool own : {false, true}) {
      run_toy(2,
              [&](ToyRank& r) {
                auto reference = make_toy_model();
                torch::optim::SGD torch_optimizer(r.context->parameters(), 0.1),
                    reference_optimizer(reference->parameters(), 0.1);
                Sgd own_optimizer(*r.context, {.learning_rate = 0.1});
                for (int step = 0; step < 3; ++step) {
                  reference_optimizer.zero_grad();
                  toy_loss(reference, step).backward();
                  reference_optimizer.step();
                  toy_loss(r.model, step).backward();
                  (void)toy_loss(r.model, step).item<double>();  // tracked, never followed by a backward
                  if (own)
                    own_optimizer.step();
                  else
                    torch_optimizer.step();
                  own_optimizer.zero_grad();
                }
                EXPECT_NEAR(toy_loss(r.model, 7).item<double>(), toy_loss(reference, 7).item<double>(), 1e-5)
                    << strategy.name << own;
              },
              {}, {.placements = strategy});
    }
  }
}

TEST(Lifecycle, RecordedOrderDoesNotDependOnShapesThatDifferBetweenRanks) {
  run_toy(2,
          [](ToyRank& r) {
            for (int step = 0; step < 4; ++step) {
              const std::int64_t rows = step % 2 == 1 && r.rank == 1 ? 2 : 4;
              r.model->forward(random({rows, kToyInputs}, step)).sum().backward();
            }
            EXPECT_EQ(r.context->counters().order_mismatches, 0);
          },
          {.prefetch = Prefetch::recorded(2)});
}

TEST(Lifecycle, WeightsWrittenInsideAnAccumulationWindowAreSeen) {
  run_toy(2,
          [](ToyRank& r) {
            auto scope = r.context->no_sync();
            const double before = toy_loss(r.model, 1).item<double>();
            toy_loss(r.model, 1).backward();
            {
              at::NoGradGuard no_grad;
              for (auto& leaf : r.context->parameters()) leaf.mul_(0.5);
            }
            EXPECT_NE(toy_loss(r.model, 1).item<double>(), before);
          },
          {}, {.placements = zero1("dp")});
}

TEST(Lifecycle, AnEvaluationLeavesNothingGatheredAndChangesNothing) {
  run_toy(2, [](ToyRank& r) {
    toy_loss(r.model, 1).backward();
    const auto before = r.context->full_gradient("blocks.0.up.weight");
    {
      at::NoGradGuard no_grad;
      (void)toy_loss(r.model, 5);
    }
    for (const auto& unit : r.context->units()) EXPECT_FALSE(unit->gathered()) << unit->name();
    EXPECT_EQ(r.context->memory_report().gathered, Bytes(0));
    EXPECT_TRUE(at::equal(before, r.context->full_gradient("blocks.0.up.weight")));
  });
}

TEST(Lifecycle, BackwardWithoutZeroGradAddsUp) {
  run_toy(2, [](ToyRank& r) {
    toy_loss(r.model, 1 + r.rank).backward();
    const auto once = r.context->full_gradient("blocks.0.up.weight");
    toy_loss(r.model, 1 + r.rank).backward();
    EXPECT_TRUE(at::allclose(r.context->full_gradient("blocks.0.up.weight"), once * 2));
  });
}

TEST(Lifecycle, AGradientTheUserKeepsIsNotOverwritten) {
  run_toy(2, [](ToyRank& r) {
    toy_loss(r.model, 1).backward();
    auto leaf = r.context->parameters()[0];
    const auto kept = leaf.grad();
    const auto copy = kept.clone();
    for (auto& p : r.context->parameters()) p.mutable_grad().reset();
    toy_loss(r.model, 9).backward();
    EXPECT_TRUE(at::equal(kept, copy));
    EXPECT_FALSE(leaf.grad().is_same(kept));
  });
}

TEST(Lifecycle, AGradientTheUserReplacesCounts) {
  run_toy(2, [](ToyRank& r) {
    toy_loss(r.model, 1).backward();
    for (auto& p : r.context->parameters()) p.mutable_grad() = p.grad() * 3;
    const auto tripled = r.context->full_gradient("blocks.0.up.weight");
    toy_loss(r.model, 1).backward();
    EXPECT_TRUE(at::allclose(r.context->full_gradient("blocks.0.up.weight"), tripled / 3 * 4));
  });
}

TEST(Lifecycle, OneSidedUseCountsAbsentRanksAsZeroAndUnusedEverywhereStaysUndefined) {
  struct BranchImpl : torch::nn::Module {
    BranchImpl() {
      a = register_parameter("a", at::ones({3, 4}));
      b = register_parameter("b", at::ones({5}));
      never = register_parameter("never", at::ones({300}));
    }
    at::Tensor forward(at::Tensor x, bool use_b) { return use_b ? (x * b.sum()).sum() : (x * a.sum()).sum(); }
    at::Tensor a, b, never;
  };
  run_ranks(2, [](World world) {
    auto context = FsdpContext::create(DeviceMesh(world, {{"dp", 2}}));
    auto model = std::make_shared<Hooked<BranchImpl>>();
    context->fully_shard(model, {});
    const bool second = world.rank().value() == 1;
    model->forward(at::ones({2}), second).backward();
    EXPECT_TRUE(at::equal(context->full_gradient("a"), at::ones({3, 4}) * 1));
    EXPECT_TRUE(at::equal(context->full_gradient("b"), at::ones({5}) * 1));
    for (auto& [name, leaf] : context->named_parameters()) {
      if (leaf.numel() == 0) continue;
      EXPECT_EQ(leaf.grad().defined(), name != "never") << name;
    }
    // Accumulated over microbatches: used in one of them is used.
    for (auto& leaf : context->parameters()) leaf.mutable_grad().reset();
    {
      auto scope = context->no_sync();
      model->forward(at::ones({2}), true).backward();
    }
    model->forward(at::ones({2}), false).backward();
    EXPECT_TRUE(at::equal(context->full_gradient("a"), at::ones({3, 4}) * 2));
    EXPECT_TRUE(at::equal(context->full_gradient("b"), at::ones({5}) * 2));
  });
}

TEST(Lifecycle, MaterializedValuesDoNotDependOnTheNumberOfRanks) {
  std::map<std::string, at::Tensor> first;
  for (int ranks : {1, 2, 3}) {
    run_ranks(ranks, [&](World world) {
      auto context = FsdpContext::create(DeviceMesh(world, {{"dp", world.size()}}));
      auto model = make_toy_model();
      for (auto& parameter : model->parameters()) {
        const at::Tensor meta = at::empty(parameter.sizes(), parameter.options().device(at::kMeta));
        parameter.unsafeGetTensorImpl()->shallow_copy_from(meta.getIntrusivePtr());
      }
      shard_toy_model(*context, model, {});
      EXPECT_THROW((void)toy_loss(model, 1), UsageError);
      context->reset();
      context->materialize(
          [](const std::string&, at::Tensor& whole, at::Generator& generator) { whole.normal_(0, 1, generator); },
          {.seed = 3});
      std::map<std::string, at::Tensor> values;
      for (auto& [name, leaf] : context->named_parameters()) values[name] = context->full_parameter(name);
      if (world.rank().value() == 0) {
        if (ranks == 1) first = values;
        ASSERT_EQ(values.size(), first.size());
        for (auto& [name, value] : values) EXPECT_TRUE(at::equal(value, first[name])) << name;
        EXPECT_FALSE(at::equal(first["blocks.0.up.weight"], first["blocks.1.up.weight"]));
      }
      EXPECT_TRUE(std::isfinite(toy_loss(model, 1).item<double>()));
    });
  }
}

TEST(Lifecycle, WeightsBuiltDifferentlyBecomeRankZeros) {
  run_ranks(3, [](World world) {
    auto context = FsdpContext::create(DeviceMesh(world, {{"dp", 3}}));
    auto model = make_toy_model();
    at::NoGradGuard no_grad;
    for (auto& parameter : model->parameters()) parameter.fill_(static_cast<double>(world.rank().value() + 1));
    shard_toy_model(*context, model, {});
    EXPECT_TRUE(at::equal(context->full_parameter("blocks.2.down.weight"), at::ones({7, 19})));
  });
}

TEST(Lifecycle, SeveralModulesFormOneUnit) {
  run_ranks(2, [](World world) {
    auto context = FsdpContext::create(DeviceMesh(world, {{"dp", 2}}));
    auto model = make_toy_model();
    context->fully_shard({model->blocks[0], model->blocks[1]}, {});
    context->fully_shard(model, {});
    context->finalize();
    EXPECT_EQ(context->units().size(), 2u);
    EXPECT_EQ(context->units()[0]->name(), "blocks.0+blocks.1");
    auto reference = make_toy_model();
    toy_loss(reference, 1).backward();
    toy_loss(model, 1).backward();
    for (auto& item : reference->named_parameters()) {
      EXPECT_TRUE(at::allclose(context->full_gradient(item.key()), item.value().grad(), 1e-5, 1e-6)) << item.key();
    }
    EXPECT_EQ(context->counters().reductions, 2);
    for (const auto& unit : context->units()) EXPECT_FALSE(unit->gathered());
  });
}

TEST(Lifecycle, HooksRunThroughSequentialAndCopiesOfTheHolder) {
  run_ranks(2, [](World world) {
    auto context = FsdpContext::create(DeviceMesh(world, {{"dp", 2}}));
    Layer first(4, at::kCPU), second(4, at::kCPU);
    Layer copy = second;
    torch::nn::Sequential sequential(first, second);
    context->fully_shard(first, {});
    context->fully_shard(copy, {});
    sequential->forward(at::ones({2, 4})).sum().backward();
    EXPECT_EQ(context->counters().reductions, 2);
    EXPECT_TRUE(at::equal(context->full_gradient("#1/weight"), at::ones({4, 4}) * 8));
    EXPECT_EQ(second(at::ones({1, 4})).sum().item<double>(), 16);
  });
}

TEST(Lifecycle, StridesScalarsAndEmptyTensorsComeBackAsTheyWere) {
  struct OddImpl : torch::nn::Module {
    OddImpl() {
      transposed = register_parameter("transposed", random({3, 5}, 1).t());
      empty = register_parameter("empty", at::ones({0, 4}));
      scalar = register_parameter("scalar", at::ones({}) * 3);
    }
    at::Tensor forward(at::Tensor x) { return (transposed.matmul(x) * scalar).square().sum() + empty.sum(); }
    at::Tensor transposed, empty, scalar;
  };
  OddImpl reference;
  reference.forward(random({3, 2}, 2)).backward();
  for (int ranks : {1, 2, 5}) {
    run_ranks(ranks, [&](World world) {
      auto context = FsdpContext::create(DeviceMesh(world, {{"dp", world.size()}}));
      auto model = std::make_shared<Hooked<OddImpl>>();
      context->fully_shard(model, {});
      EXPECT_EQ(model->transposed.strides(), reference.transposed.strides());
      model->forward(random({3, 2}, 2)).backward();
      for (auto& item : reference.named_parameters()) {
        EXPECT_TRUE(at::allclose(context->full_gradient(item.key()), item.value().grad(), 1e-5, 1e-6)) << item.key();
        EXPECT_TRUE(at::equal(context->full_parameter(item.key()), item.value())) << item.key();
      }
    });
  }
}

TEST(Lifecycle, AGraphMayOutliveItsContext) {
  run_ranks(1, [](World world) {
    at::Tensor loss;
    {
      auto context = FsdpContext::create(DeviceMesh(world, {{"dp", 1}}));
      auto model = make_toy_model();
      shard_toy_model(*context, model, {});
      loss = toy_loss(model, 1);
    }
    EXPECT_ANY_THROW(loss.backward());
  });
}

TEST(Lifecycle, AModelOutlivesItsContextWithItsWeightsOrWithAMessage) {
  run_ranks(1, [](World world) {
    const DeviceMesh mesh(world, {{"dp", 1}});
    for (const Strategy& strategy : {ddp("dp"), zero1("dp"), zero3("dp")}) {
      auto model = make_toy_model();
      {
        auto context = FsdpContext::create(mesh);
        shard_toy_model(*context, model, {.placements = strategy});
        toy_loss(model, 1).backward();
      }
      auto again = FsdpContext::create(mesh);
      if (strategy.name == "ddp") {  // main weights, whole on every rank
        EXPECT_TRUE(std::isfinite(toy_loss(model, 1).item<double>()));
        shard_toy_model(*again, model, {});
        continue;
      }
      const auto told = [&](const std::function<void()>& action, const std::string& part) {
        try {
          action();
          ADD_FAILURE() << "no error under " << strategy.name;
        } catch (const std::exception& error) {
          EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
        }
      };
      told([&] { (void)toy_loss(model, 1); }, "the FsdpContext that sharded parameter");
      told([&] { again->fully_shard(model->blocks[0], {}); },
           "has no data: the FsdpContext that sharded it was destroyed");
    }
  });
}

TEST(Lifecycle, PoliciesGiveEqualBits) {
  std::vector<ContextOptions> policies(6);
  policies[1].prefetch = Prefetch::none();
  policies[2].prefetch = Prefetch::depth(3);
  policies[3].reduction = Reduction::delayed(2);
  policies[4].unify_communication_stream = true;
  policies[5].inline_limit = Bytes(1 << 20);  // serialised: every collective on the calling thread
  std::map<std::string, at::Tensor> first;
  for (std::size_t i = 0; i < policies.size(); ++i) {
    if (i != 5) policies[i].inline_limit = Bytes(0);
    run_toy(
        2,
        [&](ToyRank& r) {
          AdamW optimizer(*r.context, {});
          for (int step = 0; step < 3; ++step) {
            toy_loss(r.model, 10 * step + r.rank).backward();
            optimizer.step(clip_grad_norm_(*r.context, 0.5));
            optimizer.zero_grad();
          }
          for (auto& [name, leaf] : r.context->named_parameters()) {
            const auto value = r.context->full_parameter(name);
            if (r.rank != 0) continue;
            if (i == 0) first[name] = value;
            EXPECT_TRUE(at::equal(value, first[name])) << name << " under policy " << i;
          }
        },
        policies[i]);
  }
}

}  // namespace
}  // namespace fsdp::testing
