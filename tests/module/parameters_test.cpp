// Which parameters a unit may hold: unused, late, of several dtypes and odd shapes (frozen: frozen_test.cpp; tied:
// tied_weights_test.cpp). The right value is always that of an unsharded run.
#include <ATen/TensorOperators.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include "tests/support/equals_unsharded.h"

namespace fsdp::testing {
namespace {

// --- Unused, on some ranks or all ---

struct BranchImpl : torch::nn::Module {
  explicit BranchImpl(std::int64_t width) {
    a = register_parameter("a", at::ones({width, width}));
    b = register_parameter("b", at::ones({width, width}));
    never = register_parameter("never", at::ones({width}));
  }
  at::Tensor forward(at::Tensor x, int branch) {
    if (branch == 0) return at::matmul(x, a);
    if (branch == 1) return fsdp::linear(x, b);
    return x;  // no parameter is used
  }
  at::Tensor a, b, never;
};
FSDP_MODULE(Branch);

struct BranchesImpl : torch::nn::Module {
  explicit BranchesImpl(int depth) {
    for (int i = 0; i < depth; ++i) layers->push_back(Branch(5));
    register_module("layers", layers);
    out = register_parameter("out", at::ones({5}));
  }
  at::Tensor forward(at::Tensor x, const std::vector<int>& branches) {
    for (std::size_t i = 0; i < layers->size(); ++i)
      x = layers[i]->as<fsdp::Hooked<BranchImpl>>()->forward(x, branches[i]).tanh();
    return x * out;
  }
  torch::nn::ModuleList layers;
  at::Tensor out;
};
FSDP_MODULE(Branches);

UnshardedCase<Branches> branches(std::function<std::vector<int>(int rank)> choose,
                                 const Strategy& strategy = zero3("dp")) {
  UnshardedCase<Branches> c;
  c.make = [] { return filled(Branches(4)); };
  c.shard = [=](FsdpContext& context, Branches& model) {
    for (auto& layer : *model->layers) context.fully_shard(layer, {.placements = strategy});
    context.fully_shard(model, {.placements = strategy});
  };
  c.run_backward = [=](Branches& model, int rank) {
    model->forward(random({3, 5}, 70 + rank).set_requires_grad(true), choose(rank)).sum().backward();
  };
  return c;
}

TEST(Parameters, RanksThatUseDifferentParametersOfTheirUnitsAgreeOnTheOrderOfReductions) {
  for (const auto& strategy : {zero3("dp"), zero1("dp")}) {
    for (bool delayed : {false, true}) {
      for (bool unified : {false, true}) {
        auto c = branches([](int rank) { return std::vector<int>{rank % 2, (rank + 1) % 2, rank % 2, 0}; }, strategy);
        if (delayed) c.context.reduction = Reduction::delayed(1);
        c.context.unify_communication_stream = unified;
        c.context.inline_limit = Bytes(0);
        expect_equals_unsharded(c);
      }
    }
  }
}

struct TwoHeadsImpl : torch::nn::Module {
  TwoHeadsImpl() {
    for (int i = 0; i < 3; ++i) layers->push_back(Branch(5));
    register_module("layers", layers);
    first = register_parameter("first", at::ones({5}));
    second = register_parameter("second", at::ones({5}));
  }
  at::Tensor forward(at::Tensor x, bool both) {
    for (auto& layer : *layers) x = layer->as<fsdp::Hooked<BranchImpl>>()->forward(x, 0).tanh();
    return both ? x * first + x * second : x * first;
  }
  torch::nn::ModuleList layers;
  at::Tensor first, second;
};
FSDP_MODULE(TwoHeads);

// The root's gradients are complete as backward begins, but not on the rank that leaves a head out.
TEST(Parameters, ARootWhoseHeadIsUnusedOnOneRankIsReducedInTheSamePlaceOnAll) {
  for (auto inline_limit : {Bytes(0), Bytes(1 << 20)}) {
    UnshardedCase<TwoHeads> c;
    c.make = [] { return filled(TwoHeads()); };
    c.shard = [](FsdpContext& context, TwoHeads& model) {
      for (auto& layer : *model->layers) context.fully_shard(layer, {});
      context.fully_shard(model, {});
    };
    c.run_backward = [](TwoHeads& model, int rank) {
      model->forward(random({3, 5}, rank), rank == 0).sum().backward();
    };
    c.context.inline_limit = inline_limit;
    expect_equals_unsharded(c);
  }
}

TEST(Parameters, AUnitThatReturnsItsInputHasNoGradientsAndIsDropped) {
  expect_equals_unsharded(branches([](int) { return std::vector<int>{0, 2, 1, 2}; }));
  expect_equals_unsharded(branches([](int) { return std::vector<int>{2, 2, 2, 2}; }));
  // On one rank only: that rank takes part with zeros. A unit that hands a leaf through has no place in the graph, so
  // ranks must be told to take part.
  expect_equals_unsharded(branches([](int rank) {
    return std::vector<int>{0, rank == 0 ? 2 : 0, rank == 0 ? 1 : 2, 0};
  }));
  auto first = branches([](int rank) { return std::vector<int>{rank == 0 ? 2 : 0, 1, rank == 0 ? 1 : 2, 0}; });
  first.context.skipped_units = SkippedUnits::participate;
  expect_equals_unsharded(first);
}

TEST(Parameters, FirstUsedInTheLastMicrobatchCountsOnceInEveryStrategy) {
  for (const auto& strategy : {ddp("dp"), zero1("dp"), zero2("dp"), zero3("dp")}) {
    for (auto policy : {ReducePolicy::every_microbatch, ReducePolicy::last_microbatch}) {
      auto c = branches({}, strategy);
      c.run_backward = [](Branches& model, int rank) {
        for (int m = 0; m < 2; ++m) model->forward(random({3, 5}, 70 + rank + 10 * m), {0, m, 0, m}).sum().backward();
      };
      const auto expected = mean_gradients(c, 2);
      run_ranks(2, [&](World world) {
        auto context = FsdpContext::create(DeviceMesh(world, {{"dp", 2}}), {.reduce = policy});
        auto model = c.make();
        c.shard(*context, model);
        const int rank = static_cast<int>(world.rank().value());
        for (int m = 0; m < 2; ++m) {
          auto scope = context->microbatch({.is_last = m == 1});
          model->forward(random({3, 5}, 70 + rank + 10 * m), {0, m, 0, m}).sum().backward();
        }
        expect_gradients(*context, expected, 1e-5, strategy.name);
      });
    }
  }
}

// --- Dtypes and shapes in one unit ---

struct MixedImpl : torch::nn::Module {
  MixedImpl() {
    weight = register_parameter("weight", at::ones({6, 6}, at::kBFloat16));
    gate = register_parameter("gate", at::ones({6, 6}));
    base = register_parameter("base", at::ones({6}, at::kDouble), /*requires_grad=*/false);
    bias = register_parameter("bias", at::ones({6}, at::kDouble));
  }
  at::Tensor forward(at::Tensor x) {
    const auto routed = at::matmul(x, gate);  // fp32
    return at::matmul(x.to(at::kBFloat16), weight).to(at::kDouble) + routed + bias * base;
  }
  at::Tensor weight, gate, base, bias;
};
FSDP_MODULE(Mixed);

TEST(Parameters, SeveralDtypesFrozenAndTrainableLiveInOneUnit) {
  UnshardedCase<Mixed> c;
  c.make = [] { return filled(Mixed()); };
  c.shard = [](FsdpContext& context, Mixed& model) {
    auto& unit = context.fully_shard(model, {});
    EXPECT_EQ(unit.groups().size(), 4u);
    for (auto& [name, leaf] : context.named_parameters())
      EXPECT_EQ(leaf.scalar_type(), name == "weight" ? at::kBFloat16
                                    : name == "gate" ? at::kFloat
                                                     : at::kDouble)
          << name;
  };
  c.run_backward = [](Mixed& model, int rank) { model->forward(random({3, 6}, 5 + rank)).sum().backward(); };
  c.tolerance = 1e-2;  // the bf16 weight's; the others are compared below
  expect_equals_unsharded(c);
  const auto expected = mean_gradients(c, 2);
  run_ranks(2, [&](World world) {
    auto context = FsdpContext::create(DeviceMesh(world, {{"dp", 2}}));
    auto model = c.make();
    c.shard(*context, model);
    c.run_backward(model, static_cast<int>(world.rank().value()));
    EXPECT_TRUE(at::allclose(context->full_gradient("gate").to(at::kDouble), expected.at("gate"), 1e-6, 1e-6));
    EXPECT_TRUE(at::equal(context->full_gradient("bias"), expected.at("bias")));
  });
}

TEST(Parameters, SmallOnesCanStayReplicated) {
  for (int ranks : {1, 2, 3}) {
    auto reference = make_toy_model();
    Gradients expected;
    for (int rank = 0; rank < ranks; ++rank) (toy_loss(reference, 1 + rank) / ranks).backward();
    for (auto& item : reference->named_parameters()) expected[item.key()] = item.value().grad().to(at::kDouble);
    for (bool bf16 : {false, true}) {
      run_toy(
          ranks,
          [&](ToyRank& r) {
            const auto& unit = r.context->unit("blocks.0");
            EXPECT_EQ(unit.groups().size(), 2u);
            EXPECT_TRUE(unit.groups()[0]->releasable() != unit.groups()[1]->releasable());
            toy_loss(r.model, 1 + r.rank).backward();
            if (!bf16) expect_gradients(*r.context, expected, 1e-5, "replicated");
            const auto norm = grad_norm(*r.context).item<double>();
            double squares = 0;
            for (auto& [name, gradient] : expected)
              squares += r.context->full_gradient(name).square().sum().item<double>();
            EXPECT_NEAR(norm, std::sqrt(squares), 1e-5 * norm);
            // A step reaches every rank's copy.
            Sgd optimizer(*r.context, {.learning_rate = 0.1});
            optimizer.step();
            const auto gain = r.context->full_parameter("blocks.0.gain");
            auto scope = r.context->unshard_scope(r.context->unit("blocks.0"));
            EXPECT_TRUE(at::equal(r.model->blocks[0]->as<ToyBlockImpl>()->gain, bf16 ? gain.to(at::kBFloat16) : gain));
          },
          {},
          {.mixed_precision = bf16 ? MixedPrecisionPolicy{.param_dtype = at::kBFloat16} : MixedPrecisionPolicy{},
           .replicate_up_to = 19});
    }
  }
}

struct ShapesImpl : torch::nn::Module {
  explicit ShapesImpl(const std::vector<std::vector<std::int64_t>>& shapes) {
    for (std::size_t i = 0; i < shapes.size(); ++i)
      list.push_back(register_parameter("p" + std::to_string(i), at::ones(shapes[i])));
  }
  at::Tensor forward(at::Tensor x) {
    at::Tensor sum = x.sum();
    for (auto& p : list) sum = sum + (p * p * x.sum()).sum();
    return sum;
  }
  std::vector<at::Tensor> list;
};
FSDP_MODULE(Shapes);

TEST(Parameters, OddShapesTrainOnRanksThatHoldNothing) {
  const std::vector<std::vector<std::vector<std::int64_t>>> sets{
      {{1, 8}, {3, 8}, {5}}, {{1, 8}}, {{}, {0, 3}, {1}, {2, 1, 3}}};
  for (const auto& shapes : sets) {
    for (int ranks : {1, 2, 4, 7}) {
      auto reference = filled(Shapes(shapes));
      torch::optim::AdamW reference_optimizer(reference->parameters());
      for (int step = 0; step < 2; ++step) {
        reference_optimizer.zero_grad();
        for (int rank = 0; rank < ranks; ++rank) (reference->forward(random({2}, rank)) / ranks).backward();
        reference_optimizer.step();
      }
      run_ranks(ranks, [&](World world) {
        auto context = FsdpContext::create(DeviceMesh(world, {{"dp", ranks}}));
        auto model = filled(Shapes(shapes));
        context->fully_shard(model, {});
        torch::optim::AdamW optimizer(context->parameters());
        for (int step = 0; step < 2; ++step) {
          optimizer.zero_grad();
          model->forward(random({2}, static_cast<int>(world.rank().value()))).backward();
          clip_grad_norm_(*context, 1e9);
          optimizer.step();
        }
        for (auto& item : reference->named_parameters()) {
          EXPECT_TRUE(at::allclose(context->full_parameter(item.key()), item.value(), 1e-5, 1e-6)) << item.key();
        }
      });
    }
  }
}

// --- What the user holds ---

TEST(Parameters, ValuesLoadedIntoTheLeavesAreSeen) {
  run_toy(2, [](ToyRank& r) {
    // In place, into the leaves.
    for (auto& [name, leaf] : r.context->named_parameters()) {
      at::NoGradGuard no_grad;
      leaf.fill_(0.25);
    }
    auto scope = r.context->unshard_scope(r.context->unit("blocks.0"));
    EXPECT_TRUE(at::equal(r.model->blocks[0]->as<ToyBlockImpl>()->gain, at::ones({7}) * 0.25));
  });
}

}  // namespace
}  // namespace fsdp::testing
