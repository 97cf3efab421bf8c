// Dtypes, divisors and accumulation: exact values that a wrong rule cannot give.
#include <ATen/TensorOperators.h>
#include <ATen/ops/conv1d.h>
#include <ATen/ops/linear.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/optim/sgd.h>

#include "tests/support/equals_unsharded.h"

namespace fsdp::testing {
namespace {

// Its gradient is whatever is fed in.
struct ScaleImpl : torch::nn::Module {
  explicit ScaleImpl(std::int64_t width = 3) { weight = register_parameter("weight", at::ones({width})); }
  at::Tensor forward(at::Tensor x) { return (weight * x).sum(); }
  at::Tensor weight;
};
FSDP_MODULE(Scale);

DeviceMesh mesh_of(const World& world, int outer, int inner) {
  return DeviceMesh(world, {{"outer", outer}, {"inner", inner}});
}

std::vector<Strategy> two_axis_strategies() {
  return {hsdp("outer", "inner"),  hfsdp("outer", "inner"),   zero3({"outer", "inner"}),
          ddp({"outer", "inner"}), zero1({"outer", "inner"}), zero2({"outer", "inner"})};
}

TEST(Divisors, ExactOnEveryMeshGroupsOfOneIncluded) {
  for (auto [outer, inner] :
       std::vector<std::pair<int, int>>{{1, 1}, {1, 2}, {2, 1}, {1, 3}, {3, 1}, {2, 2}, {1, 4}, {4, 1}}) {
    for (const auto& strategy : two_axis_strategies()) {
      for (std::optional<double> divisor :
           {std::optional<double>(), std::optional<double>(300.0), std::optional<double>(1.0)}) {
        run_ranks(outer * inner, [&](World world) {
          auto context = FsdpContext::create(mesh_of(world, outer, inner));
          Scale model;
          context->fully_shard(model, {.placements = strategy, .gradient_divisor = divisor});
          const int n = outer * inner;
          model->forward(at::ones({3}) * static_cast<double>(1 << world.rank().value())).backward();
          const double sum = (1 << n) - 1;
          EXPECT_TRUE(at::equal(context->full_gradient("weight"),
                                at::full({3}, static_cast<float>(sum) / static_cast<float>(divisor.value_or(n)))))
              << strategy.name << " " << outer << "x" << inner;
          // Replicas that see different data hold equal weights after a step.
          torch::optim::SGD optimizer(context->parameters(), 0.5);
          optimizer.step();
          const auto value = context->full_parameter("weight");
          EXPECT_TRUE(at::equal(value, at::ones({3}) - context->full_gradient("weight") * 0.5));
        });
      }
    }
  }
}

// Expert weights owned by fewer ranks than whose data they see.
TEST(Divisors, AUnitTakesItsAveragingApartFromItsShards) {
  run_ranks(2, [](World world) {
    auto context = FsdpContext::create(mesh_of(world, 2, 1));
    Scale shared, expert;
    context->fully_shard(shared, {.placements = zero3("outer")});
    context->fully_shard(expert, {.placements = zero3("inner"), .gradient_divisor = 2.0});
    shared->forward(at::ones({3})).backward();
    expert->forward(at::ones({3}) * 6).backward();
    EXPECT_TRUE(at::equal(context->full_gradient("weight"), at::ones({3})));
    EXPECT_TRUE(at::equal(context->full_gradient("#1/weight"), at::ones({3}) * 3));
  });
}

// 256 + 1 is not a bf16 number: sums kept in bf16 stay at 256.
TEST(Accumulation, IsAsWideAsTheMainGradientInEveryStrategy) {
  for (auto [outer, inner] : std::vector<std::pair<int, int>>{{1, 1}, {2, 1}, {1, 2}, {2, 2}}) {
    for (const auto& strategy : two_axis_strategies()) {
      for (auto policy : {ReducePolicy::every_microbatch, ReducePolicy::last_microbatch}) {
        for (bool last_dtype : {false, true}) {
          run_ranks(outer * inner, [&](World world) {
            auto context = FsdpContext::create(mesh_of(world, outer, inner), {.reduce = policy});
            Scale model;
            model->weight.set_data(model->weight.detach().to(at::kBFloat16));
            MixedPrecisionPolicy dtypes{.param_dtype = at::kBFloat16, .reduce_dtype = at::kBFloat16};
            (last_dtype ? dtypes.main_param_dtype : dtypes.main_grad_dtype) = at::kFloat;
            context->fully_shard(model, {.placements = strategy, .mixed_precision = dtypes});
            for (int m = 0; m < 2; ++m) {
              auto scope = context->microbatch({.is_last = m == 1});
              model->forward(at::ones({3}) * (m == 0 ? 256.0 : 1.0)).backward();
            }
            // What travels once at the end, after the sum was made, is rounded to the wire's dtype by the user's
            // choice.
            const bool rounded_at_end = policy == ReducePolicy::last_microbatch ? outer * inner > 1
                                        : strategy.gradient[0] == Placement::partial && outer > 1
                                            ? true
                                            : strategy.gradient[1] == Placement::partial && inner > 1;
            const auto gradient = context->full_gradient("weight");
            EXPECT_EQ(gradient.scalar_type(), at::kFloat);
            if (!rounded_at_end) {
              EXPECT_TRUE(at::equal(gradient, at::full({3}, 257.0f)))
                  << strategy.name << " " << outer << "x" << inner << " " << gradient[0].item<float>();
            } else {
              EXPECT_NEAR(gradient[0].item<float>(), 257, 1.1);
            }
          });
        }
      }
    }
  }
}

TEST(Accumulation, FourMicrobatchesOfHybridsKeepFullWidthBetweenThem) {
  for (const auto& strategy : {hsdp("outer", "inner"), hfsdp("outer", "inner")}) {
    run_ranks(4, [&](World world) {
      auto context = FsdpContext::create(mesh_of(world, 2, 2));
      Scale model;
      context->fully_shard(model, {.placements = strategy,
                                   .mixed_precision = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}});
      for (int m = 0; m < 4; ++m) {
        auto scope = context->microbatch({.is_last = m == 3});
        model->forward(at::ones({3}) * (m == 0 ? 256.0 : 1.0)).backward();
      }
      EXPECT_TRUE(at::equal(context->full_gradient("weight"), at::full({3}, 259.0f))) << strategy.name;
    });
  }
}

TEST(Accumulation, UnitsThatTakeTurnsInTheSameSlotsAddEveryMicrobatch) {
  for (int ranks : {1, 2}) {
    for (const auto& strategy : {zero1("dp"), zero2("dp"), zero3("dp")}) {
      run_toy(ranks,
              [&](ToyRank& r) {
                auto reference = make_toy_model();
                for (int m = 0; m < 3; ++m) {
                  for (int rank = 0; rank < ranks; ++rank) (toy_loss(reference, 10 * m + rank) / ranks).backward();
                  auto scope = r.context->microbatch({.is_last = m == 2});
                  toy_loss(r.model, 10 * m + r.rank).backward();
                }
                for (auto& item : reference->named_parameters()) {
                  EXPECT_TRUE(at::allclose(r.context->full_gradient(item.key()), item.value().grad(), 1e-5, 1e-6));
                }
              },
              {}, {.placements = strategy});
    }
  }
}

// --- The policy ---

TEST(MixedPrecision, EveryDtypeIsTheOneAskedFor) {
  run_ranks(2, [](World world) {
    auto context = FsdpContext::create(DeviceMesh(world, {{"dp", 2}}));
    struct ProbeImpl : torch::nn::Module {
      ProbeImpl() {
        weight = register_parameter("weight", at::ones({3}));
        kept = register_parameter("kept", at::ones({3}));
        table = register_buffer("table", at::ones({3}));
        count = register_buffer("count", at::ones({3}, at::kLong));
      }
      at::Tensor forward(at::Tensor x) {
        seen = {x.scalar_type(), weight.scalar_type(), kept.scalar_type(), table.scalar_type(), count.scalar_type()};
        return x * weight * table + (x.to(at::kFloat) * kept).to(x.scalar_type());
      }
      at::Tensor weight, kept, table, count;
      std::vector<at::ScalarType> seen;
    };
    auto model = std::make_shared<Hooked<ProbeImpl>>();
    context->fully_shard(model,
                         {.mixed_precision = {
                              .param_dtype = at::kBFloat16,
                              .reduce_dtype = at::kFloat,
                              .main_param_dtype = at::kDouble,
                              .main_grad_dtype = at::kFloat,
                              .output_dtype = at::kFloat,
                              .buffer_dtype = at::kBFloat16,
                              .keep_dtype = [](const std::string& name, const at::Tensor&) { return name == "kept"; },
                          }});
    auto y = model->forward(at::ones({3}));
    EXPECT_EQ(model->seen,
              (std::vector<at::ScalarType>{at::kBFloat16, at::kBFloat16, at::kFloat, at::kBFloat16, at::kLong}));
    EXPECT_EQ(y.scalar_type(), at::kFloat);
    y.sum().backward();
    for (auto& leaf : context->parameters()) {
      EXPECT_EQ(leaf.scalar_type(), at::kDouble);
      if (leaf.numel() > 0) {
        EXPECT_EQ(leaf.grad().scalar_type(), at::kFloat);
      }
    }
    for (auto* group : context->groups()) EXPECT_EQ(group->dtypes().reduce, at::kFloat);
    // Inputs are left alone on request, and integers always.
    Sgd optimizer(*context, {.learning_rate = 0.5});
    optimizer.step();
    EXPECT_TRUE(at::equal(context->full_parameter("kept"), at::full({3}, 0.5, at::kDouble)));
  });
}

TEST(MixedPrecision, UnitsOverrideEachOther) {
  run_ranks(2, [](World world) {
    auto context = FsdpContext::create(DeviceMesh(world, {{"dp", 2}}));
    auto model = make_toy_model();
    context->fully_shard(model->blocks[0], {.mixed_precision = {.param_dtype = at::kBFloat16}});
    context->fully_shard(model->blocks[1], {.mixed_precision = {.param_dtype = at::kHalf}});
    context->fully_shard(model->blocks[2], {});
    context->fully_shard(model, {});
    EXPECT_EQ(model->blocks[0]->as<ToyBlockImpl>()->gain.scalar_type(), at::kBFloat16);
    EXPECT_EQ(model->blocks[1]->as<ToyBlockImpl>()->gain.scalar_type(), at::kHalf);
    EXPECT_EQ(model->blocks[2]->as<ToyBlockImpl>()->gain.scalar_type(), at::kFloat);
    const auto block = [&](int i) { return model->blocks[i]->as<Hooked<ToyBlockImpl>>(); };
    EXPECT_EQ(block(0)->forward(random({2, 7}, 1)).scalar_type(), at::kBFloat16);
    EXPECT_EQ(block(1)->forward(random({2, 7}, 1)).scalar_type(), at::kHalf);
  });
}

struct ConvNormImpl : torch::nn::Module {
  ConvNormImpl()
      : conv(register_module("conv", torch::nn::Conv1d(torch::nn::Conv1dOptions(2, 4, 1)))),
        norm(register_module("norm", torch::nn::BatchNorm1d(4))) {}
  at::Tensor forward(at::Tensor x) {
    x = conv->forward(x);
    return norm->forward(x.to(norm->weight.scalar_type()));
  }
  torch::nn::Conv1d conv;
  torch::nn::BatchNorm1d norm;
};
FSDP_MODULE(ConvNorm);

TEST(MixedPrecision, RunningStatisticsStayWideUnderLowPrecisionCompute) {
  auto reference = filled(ConvNorm());
  const auto x = random({8, 2, 5}, 3);
  reference->conv->to(at::kBFloat16);
  reference->norm->forward(reference->conv->forward(x.to(at::kBFloat16)).to(at::kFloat));
  run_ranks(2, [&](World world) {
    auto context = FsdpContext::create(DeviceMesh(world, {{"dp", 2}}));
    auto model = filled(ConvNorm());
    context->fully_shard(model, {.mixed_precision = {.param_dtype = at::kBFloat16,
                                                     .keep_dtype = [](const std::string& name, const at::Tensor&) {
                                                       return name.starts_with("norm.");
                                                     }}});
    model->forward(x).sum().backward();
    EXPECT_EQ(model->norm->running_mean.scalar_type(), at::kFloat);
    EXPECT_TRUE(at::equal(model->norm->running_mean, reference->norm->running_mean));
    EXPECT_TRUE(at::equal(model->norm->running_var, reference->norm->running_var));
    EXPECT_EQ(model->norm->num_batches_tracked.item<std::int64_t>(), 1);
  });
}

// --- Values at the start ---

TEST(InitialValues, BuffersOfEveryRankAreRankZerosWhateverTheirDtypeAndLayout) {
  struct BuffersImpl : torch::nn::Module {
    explicit BuffersImpl(int rank) {
      weight = register_parameter("weight", at::full({3}, 1.0 * rank));
      register_buffer("table", at::full({3, 2}, 1.0 * rank).t());
      register_buffer("count", at::full({}, rank, at::kLong));
      register_buffer("mask", at::full({5}, rank == 0, at::kBool));
      register_buffer("empty", at::ones({0}));
      inner = register_module("inner", torch::nn::BatchNorm1d(2));
      inner->running_mean.fill_(rank + 1);
    }
    at::Tensor forward(at::Tensor x) { return x * weight; }
    at::Tensor weight;
    torch::nn::BatchNorm1d inner{nullptr};
  };
  for (const auto& strategy : {zero3({"outer", "inner"}), hsdp("outer", "inner")}) {
    run_ranks(4, [&](World world) {
      auto context = FsdpContext::create(mesh_of(world, 2, 2));
      auto model = std::make_shared<Hooked<BuffersImpl>>(static_cast<int>(world.rank().value()));
      context->fully_shard(model, {.placements = strategy});
      const auto buffers = model->named_buffers();
      EXPECT_TRUE(at::equal(buffers["table"], at::zeros({2, 3})));
      EXPECT_EQ(buffers["count"].item<std::int64_t>(), 0);
      EXPECT_TRUE(buffers["mask"].all().item<bool>());
      EXPECT_TRUE(at::equal(buffers["inner.running_mean"], at::ones({2})));
      EXPECT_TRUE(at::equal(context->full_parameter("weight"), at::zeros({3})));
    });
  }
}

TEST(InitialValues, BuffersBuiltOnMetaAreMaterializedToo) {
  struct TableImpl : torch::nn::Module {
    TableImpl() {
      const auto meta = at::TensorOptions().device(at::kMeta);
      weight = register_parameter("weight", at::empty({3}, meta));
      table = register_buffer("table", at::empty({3}, meta));
    }
    at::Tensor forward(at::Tensor x) { return x * weight * table; }
    at::Tensor weight, table;
  };
  run_ranks(2, [](World world) {
    auto context = FsdpContext::create(DeviceMesh(world, {{"dp", 2}}));
    auto model = std::make_shared<Hooked<TableImpl>>();
    context->fully_shard(model, {});
    EXPECT_THROW((void)model->forward(at::ones({3})), UsageError);
    const double own = static_cast<double>(world.rank().value());
    context->reset();
    context->materialize([&](const std::string& name, at::Tensor& whole, at::Generator&) {
      whole.fill_(name == "table" ? 5 + own : 2);  // of buffers rank 0's values count
    });
    EXPECT_TRUE(at::equal(model->forward(at::ones({3})), at::full({3}, 10.0)));
  });
}

TEST(InitialValues, SeedsThatDifferBetweenRanksDoNotMatter) {
  run_ranks(3, [](World world) {
    auto context = FsdpContext::create(DeviceMesh(world, {{"dp", 3}}));
    auto model = filled(Scale(300), 100 * static_cast<std::uint64_t>(world.rank().value()));
    context->fully_shard(model, {});
    EXPECT_TRUE(at::equal(context->full_parameter("weight"), filled(Scale(300), 0)->weight));
  });
}

// --- The norm ---

TEST(GradientNorm, CountsEveryElementOnceOverShardsReplicasFrozenScalarsAndEmptyShards) {
  struct PartsImpl : torch::nn::Module {
    PartsImpl() {
      wide = register_parameter("wide", at::ones({256}));
      scalar = register_parameter("scalar", at::ones({}));
      frozen = register_parameter("frozen", at::ones({4}), false);
      unused = register_parameter("unused", at::ones({4}));
    }
    at::Tensor forward(at::Tensor x) { return (wide * x).sum() + scalar * 0 + frozen.sum(); }
    at::Tensor wide, scalar, frozen, unused;
  };
  for (const auto& strategy : two_axis_strategies()) {
    for (auto [outer, inner] : std::vector<std::pair<int, int>>{{1, 2}, {2, 1}, {2, 2}}) {
      for (bool bf16 : {false, true}) {
        run_ranks(outer * inner, [&](World world) {
          auto context = FsdpContext::create(mesh_of(world, outer, inner));
          auto model = std::make_shared<Hooked<PartsImpl>>();
          if (bf16) model->wide.set_data(model->wide.detach().to(at::kBFloat16));
          context->fully_shard(model, {.placements = strategy});
          auto x = at::zeros({256});
          x[0] = 3;    // the first rank's shard, where it is sharded
          x[255] = 4;  // the last one's
          model->forward(x).backward();
          const auto norm = clip_grad_norm_(*context, 1.0);
          EXPECT_NEAR(norm.item<double>(), 5, 1e-5) << strategy.name;
          const auto clipped = context->full_gradient("wide");
          EXPECT_NEAR(clipped[0].item<double>(), 0.6, bf16 ? 4e-3 : 1e-5);
          EXPECT_NEAR(clipped[255].item<double>(), 0.8, bf16 ? 4e-3 : 1e-5);
        });
      }
    }
  }
}

TEST(GradientNorm, Bf16GradientsAreSummedInAWiderDtype) {
  run_ranks(2, [](World world) {
    auto context = FsdpContext::create(DeviceMesh(world, {{"dp", 2}}));
    Scale model(4096);
    model->weight.set_data(model->weight.detach().to(at::kBFloat16));
    context->fully_shard(model, {});
    model->forward(at::ones({4096})).backward();
    EXPECT_NEAR(grad_norm(*context).item<double>(), 64, 1e-4);  // a bf16 sum would stop at 256 ones
  });
}

}  // namespace
}  // namespace fsdp::testing
