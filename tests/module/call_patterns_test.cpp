// Every way in which people call their modules: repeated and odd forwards and backwards, views, stashed values, other
// methods (signatures and results: signatures_test.cpp). The right value is always that of an unsharded run.
#include <ATen/TensorOperators.h>
#include <ATen/ops/linear.h>
#include <torch/autograd.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <map>

#include "tests/support/equals_unsharded.h"

namespace fsdp::testing {
namespace {

struct PairImpl : torch::nn::Module {
  explicit PairImpl(std::int64_t width = 4) {
    first = register_parameter("first", at::ones({width, width}));
    second = register_parameter("second", at::ones({width, width}));
  }
  at::Tensor forward(at::Tensor x) {
    middle = at::linear(x, first).tanh();
    return at::linear(middle, second);
  }
  at::Tensor encode(at::Tensor x) { return at::linear(x, first); }
  at::Tensor first, second, middle;
};
FSDP_MODULE(Pair);

struct PairsImpl : torch::nn::Module {
  explicit PairsImpl(int depth = 3) {
    for (int i = 0; i < depth; ++i) layers->push_back(Pair());
    register_module("layers", layers);
    scale = register_parameter("scale", at::ones({4}));
  }
  Hooked<PairImpl>& layer(int i) { return *layers[i]->as<Hooked<PairImpl>>(); }
  at::Tensor forward(at::Tensor x) {
    for (std::size_t i = 0; i < layers->size(); ++i) x = layer(static_cast<int>(i)).forward(x).tanh();
    return x * scale;
  }
  at::Tensor skipping(at::Tensor x, int skipped) {
    for (int i = 0; i < static_cast<int>(layers->size()); ++i) {
      if (i != skipped) x = layer(i).forward(x).tanh();
    }
    return x * scale;
  }
  torch::nn::ModuleList layers;
  at::Tensor scale;
};
FSDP_MODULE(Pairs);

UnshardedCase<Pairs> pairs(std::function<void(Pairs&, int)> run_backward, const ContextOptions& context = {},
                           const UnitOptions& options = {}) {
  UnshardedCase<Pairs> c;
  c.make = [] { return filled(Pairs()); };
  c.shard = [=](FsdpContext& context, Pairs& model) {
    for (auto& layer : *model->layers) context.fully_shard(layer, options);
    context.fully_shard(model, options);
  };
  c.run_backward = std::move(run_backward);
  c.context = context;
  return c;
}

at::Tensor input(int rank, int i = 0) { return random({3, 4}, 100 + 10 * i + rank); }

std::vector<ContextOptions> prefetches() {
  std::vector<ContextOptions> all(5);
  all[1].prefetch = Prefetch::none();
  all[2].prefetch = Prefetch::recorded(2);
  all[3].prefetch = Prefetch::delayed_release(2);
  all[4].prefetch = Prefetch::depth(2);
  all[4].keep_last = false;
  return all;
}

// Each pattern under every prefetch policy, for weights that are gathered and weights that rest.
void expect_right(const std::function<void(Pairs&, int)>& run_backward) {
  for (const auto& options : prefetches()) {
    SCOPED_TRACE(static_cast<int>(options.prefetch.kind));
    expect_equals_unsharded(pairs(run_backward, options), {2});
  }
  expect_equals_unsharded(pairs(run_backward, {}, {.placements = zero1("dp")}), {2});
  expect_equals_unsharded(pairs(run_backward, {}, {.reshard = Reshard::never}), {1, 3});
}

TEST(CallPatterns, SeveralForwardsThenOneBackward) {
  expect_right([](Pairs& m, int rank) {
    (m->forward(input(rank)).sum() + m->forward(input(rank, 1)).square().sum() + m->forward(input(rank, 2)).sum())
        .backward();
  });
}

TEST(CallPatterns, SeveralForwardsThenTheirBackwardsInAnyOrder) {
  expect_right([](Pairs& m, int rank) {
    auto a = m->forward(input(rank)).sum(), b = m->forward(input(rank, 1)).square().sum(),
         c = m->forward(input(rank, 2)).sum();
    b.backward();
    c.backward();
    a.backward();
  });
}

TEST(CallPatterns, AUnitUsedTwiceInOneForward) {
  for (auto dtype : {at::kFloat, at::kBFloat16}) {
    auto c = pairs([](Pairs& m, int rank) {
      auto x = m->layer(0).forward(input(rank)).tanh();
      x = m->layer(1).forward(x) + m->layer(0).forward(input(rank, 1));
      m->layer(1).forward(x).sum().backward();
    });
    c.shard = [=](FsdpContext& context, Pairs& model) {
      UnitOptions unit;
      if (dtype == at::kBFloat16) unit.mixed_precision = {.param_dtype = dtype, .reduce_dtype = at::kFloat};
      for (auto& layer : *model->layers) context.fully_shard(layer, unit);
      context.fully_shard(model, unit);
    };
    c.tolerance = dtype == at::kBFloat16 ? 3e-2 : 1e-5;
    expect_equals_unsharded(c, {2});
  }
}

TEST(CallPatterns, BackwardTwiceThroughARetainedGraph) {
  expect_right([](Pairs& m, int rank) {
    auto loss = m->forward(input(rank)).square().sum();
    loss.backward({}, /*keep_graph=*/true);
    loss.backward();
  });
}

TEST(CallPatterns, AGradientPenaltyGoesBackwardThroughABackward) {
  expect_right([](Pairs& m, int rank) {
    auto x = input(rank).set_requires_grad(true);
    auto y = m->forward(x);
    auto slope = torch::autograd::grad({y.sum()}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
    (y.sum() + slope.square().sum()).backward();
  });
}

TEST(CallPatterns, GradientsForChosenInputsReduceNothing) {
  run_ranks(2, [](World world) {
    auto c = pairs({});
    auto context = FsdpContext::create(DeviceMesh(world, {{"dp", 2}}));
    auto model = c.make(), reference = c.make();
    c.shard(*context, model);
    const int rank = static_cast<int>(world.rank().value());
    auto x = input(rank).set_requires_grad(true), z = input(rank).set_requires_grad(true);
    context->reset_peaks();
    auto got = torch::autograd::grad({model->forward(x).square().sum()}, {x})[0];
    EXPECT_TRUE(at::allclose(got, torch::autograd::grad({reference->forward(z).square().sum()}, {z})[0]));
    EXPECT_EQ(context->counters().reductions, 0);
    EXPECT_EQ(context->memory_report().gathered, Bytes(0));
    EXPECT_LE(context->counters().peak_gathered_units, 3);
    for (auto& leaf : context->parameters()) EXPECT_FALSE(leaf.grad().defined());
    model->forward(input(rank)).sum().backward();  // and training goes on
    EXPECT_EQ(context->counters().reductions, 4);
  });
}

TEST(CallPatterns, ALossFromAValueThatForwardStashedAway) {
  expect_right([](Pairs& m, int rank) {
    (void)m->forward(input(rank));
    m->layer(1).middle.square().sum().backward();  // layers 0 and 1's `first` only; `second` and layer 2 get nothing
  });
  expect_right([](Pairs& m, int rank) {
    auto y = m->forward(input(rank));
    (y.sum() + m->layer(0).middle.sum() + m->layer(2).middle.square().sum()).backward();
  });
}

TEST(CallPatterns, ResultsThatAreViewsAndAreChangedInPlace) {
  struct ViewImpl : torch::nn::Module {
    ViewImpl() { weight = register_parameter("weight", at::ones({4, 4})); }
    at::Tensor forward(at::Tensor x) { return at::linear(x, weight).view({-1}).narrow(0, 0, 8); }
    at::Tensor weight;
  };
  using Holder = torch::nn::ModuleHolder<Hooked<ViewImpl>>;
  for (int pattern : {0, 1, 2}) {
    UnshardedCase<Holder> c;
    c.make = [] { return filled(Holder(std::make_shared<Hooked<ViewImpl>>())); };
    c.shard = [](FsdpContext& context, Holder& model) { context.fully_shard(model, {}); };
    c.run_backward = [=](Holder& model, int rank) {
      auto y = model->forward(input(rank));
      if (pattern == 0) y.add_(y.detach() * 2);
      if (pattern == 1) y.narrow(0, 2, 3).mul_(3);
      if (pattern == 2) y.view({2, 4}).select(0, 1).copy_(random({4}, 3));
      (y * y).sum().backward();
    };
    expect_equals_unsharded(c, {2});
  }
}

TEST(CallPatterns, InPlaceChangesOfInputsAndOutputsBetweenUnits) {
  expect_right([](Pairs& m, int rank) {
    auto x = m->layer(0).forward(input(rank));
    x.mul_(2);
    x = m->layer(1).forward(x.relu_());
    x.narrow(0, 0, 1).zero_();
    m->layer(2).forward(x + 1).sum().backward();
  });
}

TEST(CallPatterns, ControlFlowThatChangesBetweenSteps) {
  for (const auto& options : prefetches()) {
    auto reference = pairs({}).make();
    torch::optim::SGD reference_optimizer(reference->parameters(), 0.1);
    for (int step = 0; step < 6; ++step) {
      reference_optimizer.zero_grad();
      for (int rank = 0; rank < 2; ++rank) (reference->skipping(input(rank, step), step % 4) / 2).sum().backward();
      reference_optimizer.step();
    }
    run_ranks(2, [&](World world) {
      auto c = pairs({});
      auto context = FsdpContext::create(DeviceMesh(world, {{"dp", 2}}), options);
      auto model = c.make();
      c.shard(*context, model);
      torch::optim::SGD optimizer(context->parameters(), 0.1);
      for (int step = 0; step < 6; ++step) {
        optimizer.zero_grad();
        fsdp::call(model, &PairsImpl::skipping, input(static_cast<int>(world.rank().value()), step), step % 4)
            .sum()
            .backward();
        optimizer.step();
      }
      for (auto& item : reference->named_parameters()) {
        EXPECT_TRUE(at::allclose(context->full_parameter(item.key()), item.value(), 1e-5, 1e-6)) << item.key();
      }
    });
  }
}

TEST(CallPatterns, EvaluationsOfAllOrPartOfTheModelBetweenAndInsideSteps) {
  for (const auto& strategy : {ddp("dp"), zero1("dp"), zero3("dp")}) {
    for (const auto& options : prefetches()) {
      for (bool bf16 : {false, true}) {
        std::map<std::string, at::Tensor> without;
        for (bool evaluate : {false, true}) {
          run_ranks(2, [&](World world) {
            auto c = pairs({}, {},
                           {.placements = strategy,
                            .mixed_precision =
                                bf16 ? MixedPrecisionPolicy{.param_dtype = at::kBFloat16} : MixedPrecisionPolicy{}});
            auto context = FsdpContext::create(DeviceMesh(world, {{"dp", 2}}), options);
            auto model = c.make();
            c.shard(*context, model);
            torch::optim::SGD optimizer(context->parameters(), 0.1);
            const int rank = static_cast<int>(world.rank().value());
            const auto look = [&](bool whole) {
              if (!evaluate) return;
              at::NoGradGuard no_grad;
              (void)(whole ? model->forward(input(rank)) : model->layer(1).forward(input(rank)));
            };
            for (int step = 0; step < 4; ++step) {
              optimizer.zero_grad();
              auto loss = model->forward(input(rank, step)).sum();
              look(step % 2 == 0);  // between a forward and its backward
              loss.backward();
              look(true);
              optimizer.step();
              look(false);
              EXPECT_EQ(context->memory_report().gathered, Bytes(0));
            }
            for (auto& [name, leaf] : context->named_parameters()) {
              const auto value = context->full_parameter(name);
              if (rank != 0) continue;
              if (!evaluate) without[name] = value;
              EXPECT_TRUE(at::equal(value, without.at(name))) << name << " " << strategy.name;
            }
          });
        }
      }
    }
  }
}

TEST(CallPatterns, AChunkedLossOnAGroupedUnit) {
  struct NormImpl : torch::nn::Module {
    NormImpl() { gain = register_parameter("gain", at::ones({4})); }
    at::Tensor forward(at::Tensor x) { return x * gain; }
    at::Tensor gain;
  };
  struct HeadImpl : torch::nn::Module {
    HeadImpl() { weight = register_parameter("weight", at::ones({6, 4})); }
    at::Tensor forward(at::Tensor x) { return at::linear(x, weight); }
    at::Tensor weight;
  };
  using Norm = torch::nn::ModuleHolder<Hooked<NormImpl>>;
  using Head = torch::nn::ModuleHolder<Hooked<HeadImpl>>;
  struct ModelImpl : torch::nn::Module {
    ModelImpl()
        : body(register_module("body", Pair())),
          norm(register_module("norm", Norm(std::make_shared<Hooked<NormImpl>>()))),
          head(register_module("head", Head(std::make_shared<Hooked<HeadImpl>>()))) {}
    // Chunks whose losses are added, or that go backward one by one.
    at::Tensor forward(at::Tensor x, bool one_by_one) {
      auto h = norm->forward(body->forward(x));
      auto detached = h.detach().set_requires_grad(true);
      at::Tensor total = at::zeros({});
      for (int i = 0; i < 3; ++i) {
        auto loss = head->forward((one_by_one ? detached : h).narrow(0, i, 1)).square().sum();
        if (one_by_one) loss.backward();
        total = total + (one_by_one ? loss.detach() : loss);
      }
      return one_by_one ? (h * detached.grad()).sum() : total;
    }
    Pair body;
    Norm norm;
    Head head;
  };
  using Model = torch::nn::ModuleHolder<Hooked<ModelImpl>>;
  for (bool one_by_one : {false, true}) {
    UnshardedCase<Model> c;
    c.make = [] { return filled(Model(std::make_shared<Hooked<ModelImpl>>())); };
    c.shard = [](FsdpContext& context, Model& model) {
      context.fully_shard(model->body, {});
      context.fully_shard({model->norm, model->head}, {});
      context.fully_shard(model, {});
    };
    c.run_backward = [=](Model& model, int rank) { model->forward(input(rank), one_by_one).backward(); };
    expect_equals_unsharded(c, {2});
  }
}

TEST(CallPatterns, MethodsOtherThanForward) {
  UnshardedCase<Pair> c;
  c.make = [] { return filled(Pair()); };
  c.shard = [](FsdpContext& context, Pair& model) { context.fully_shard(model, {}); };
  c.run_backward = [](Pair& model, int rank) {
    fsdp::call(model, &PairImpl::encode, input(rank)).square().sum().backward();
  };
  expect_equals_unsharded(c);
  run_ranks(2, [&](World world) {
    auto context = FsdpContext::create(DeviceMesh(world, {{"dp", 2}}));
    auto model = c.make();
    c.shard(*context, model);
    context->finalize();
    try {
      (void)model->encode(input(0));
      ADD_FAILURE() << "no error";
    } catch (const std::exception& error) {
      EXPECT_NE(std::string(error.what()).find("\"<root>\" was read while it is sharded"), std::string::npos)
          << error.what();
      EXPECT_NE(std::string(error.what()).find("fsdp::call"), std::string::npos);
    }
  });
}

TEST(CallPatterns, WeightsAreReadableInsideHooksAndScopesOnlyWhereTheyCouldBeStale) {
  for (const auto& strategy : {ddp("dp"), zero1("dp"), zero2("dp"), zero3("dp")}) {
    for (bool bf16 : {false, true}) {
      run_toy(2,
              [&](ToyRank& r) {
                Sgd optimizer(*r.context, {.learning_rate = 0.5});
                auto& gain = r.model->blocks[1]->as<ToyBlockImpl>()->gain;
                const bool current = strategy.name == "ddp" && !bf16;  // main weights, whole on every rank
                for (int step = 0; step < 2; ++step) {
                  toy_loss(r.model, step).backward();
                  optimizer.step();
                  optimizer.zero_grad();
                  if (current)
                    EXPECT_NO_THROW((void)(gain + 1));
                  else
                    EXPECT_ANY_THROW((void)(gain + 1)) << strategy.name;
                  auto scope = r.context->unshard_scope(r.context->unit("blocks.1"));
                  const auto latest = r.context->full_parameter("blocks.1.gain");
                  EXPECT_TRUE(at::equal(gain, latest.to(gain.scalar_type()))) << strategy.name;
                }
              },
              {},
              {.placements = strategy,
               .mixed_precision = bf16 ? MixedPrecisionPolicy{.param_dtype = at::kBFloat16} : MixedPrecisionPolicy{}});
    }
  }
}

TEST(CallPatterns, UserHooksOnParametersSeeTheLocalGradientOnce) {
  for (const auto& strategy : {zero1("dp"), zero3("dp")}) {
    auto c = pairs({}, {}, {.placements = strategy});
    auto reference = c.make();
    reference->forward(input(0)).sum().backward();
    run_ranks(1, [&](World world) {
      auto context = FsdpContext::create(DeviceMesh(world, {{"dp", 1}}));
      auto model = c.make();
      c.shard(*context, model);
      int calls = 0;
      for (auto& parameter : model->parameters())
        parameter.register_hook([&](at::Tensor g) {
          ++calls;
          return g * 3;
        });
      model->forward(input(0)).sum().backward();
      EXPECT_EQ(calls, 7);
      for (auto& item : reference->named_parameters()) {
        EXPECT_TRUE(at::allclose(context->full_gradient(item.key()), item.value().grad() * 3)) << item.key();
      }
    });
  }
}

// Whatever ran in between, a graph's backward sees the weights of its forward or is refused.
TEST(CallPatterns, WeightsWrittenBetweenForwardAndBackwardAreRefused) {
  const std::vector<std::function<void(ToyRank&)>> writes{
      [](ToyRank& r) { Sgd(*r.context, {.learning_rate = 0.1}).step(); },
      [](ToyRank& r) { torch::optim::AdamW(r.context->parameters()).step(); },
      [](ToyRank& r) {
        at::NoGradGuard no_grad;
        for (auto& leaf : r.context->parameters()) leaf.mul_(0.5);
      }};
  for (const auto& strategy : {ddp("dp"), zero1("dp"), zero3("dp")}) {
    for (std::size_t w = 0; w < writes.size(); ++w) {
      for (int between : {0, 1, 2}) {  // another backward; an evaluation; the same graph's first backward
        run_toy(2,
                [&](ToyRank& r) {
                  auto a = toy_loss(r.model, 1), b = toy_loss(r.model, 2);
                  if (between == 2)
                    b.backward({}, /*keep_graph=*/true);
                  else
                    a.backward();
                  writes[w](r);
                  if (between == 1) {
                    at::NoGradGuard no_grad;
                    (void)toy_loss(r.model, 3);
                  }
                  try {
                    b.backward();
                    ADD_FAILURE() << "no error: " << strategy.name << " " << w << " " << between;
                  } catch (const std::exception& error) {
                    EXPECT_NE(std::string(error.what()).find("were written between a forward and its backward"),
                              std::string::npos)
                        << error.what();
                  }
                  r.context->reset();
                  toy_loss(r.model, 1).backward();
                },
                {}, {.placements = strategy});
      }
    }
  }
}

// As in adversarial training: the critic steps while the generator's graph waits.
TEST(CallPatterns, OneModelMayStepWhileTheGraphOfAnotherWaits) {
  run_ranks(2, [](World world) {
    auto c = pairs({});
    auto context = FsdpContext::create(DeviceMesh(world, {{"dp", 2}}));
    auto generator = c.make(), critic = filled(Pairs(), 50);
    c.shard(*context, generator);
    c.shard(*context, critic);
    auto generator_reference = c.make(), critic_reference = filled(Pairs(), 50);
    std::vector<at::Tensor> leaves;
    for (auto& [name, leaf] : context->named_parameters()) {
      if (name.starts_with("#1/")) leaves.push_back(leaf);
    }
    torch::optim::SGD optimizer(leaves, 0.1), reference_optimizer(critic_reference->parameters(), 0.1);
    const int rank = static_cast<int>(world.rank().value());
    std::vector<at::Tensor> fakes;
    for (int r = 0; r < 2; ++r) {
      fakes.push_back(generator_reference->forward(input(r)));
      (critic_reference->forward(fakes[r].detach()).square().sum() / 2).backward();
    }
    reference_optimizer.step();
    for (int r = 0; r < 2; ++r) (critic_reference->forward(fakes[r]).sum() / 2).backward();
    const auto fake = generator->forward(input(rank));
    critic->forward(fake.detach()).square().sum().backward();
    optimizer.step();
    critic->forward(fake).sum().backward();
    for (auto& item : generator_reference->named_parameters())
      EXPECT_TRUE(at::allclose(context->full_gradient(item.key()), item.value().grad(), 1e-5, 1e-6)) << item.key();
  });
}

// Dropped and prefetched again while its backward is under way: every read waits for the gather.
TEST(CallPatterns, FrozenUnitsUsedTwiceWaitForTheirSecondGather) {
  struct WideImpl : torch::nn::Module {
    explicit WideImpl(bool frozen) {
      for (int i = 0; i < 4; ++i)
        weights.push_back(register_parameter("w" + std::to_string(i), at::ones({256, 256}), !frozen));
    }
    at::Tensor forward(at::Tensor x) {
      for (auto& w : weights) x = at::linear(x, w).tanh();
      return x;
    }
    std::vector<at::Tensor> weights;
  };
  using Wide = torch::nn::ModuleHolder<Hooked<WideImpl>>;
  struct ModelImpl : torch::nn::Module {
    ModelImpl() {
      scale = register_parameter("scale", at::ones({}));
      for (int i = 0; i < 5; ++i) {
        units.emplace_back(std::make_shared<Hooked<WideImpl>>(i < 2));
        register_module("unit" + std::to_string(i), units.back());
      }
    }
    at::Tensor forward(at::Tensor x) {
      x = x * scale;
      for (int i : {0, 1, 2, 3, 4, 0, 1}) x = units[i]->forward(x);
      return x.sum();
    }
    at::Tensor scale;
    std::vector<Wide> units;
  };
  using Model = torch::nn::ModuleHolder<Hooked<ModelImpl>>;
  UnshardedCase<Model> c;
  c.make = [] {
    auto model = filled(Model(std::make_shared<Hooked<ModelImpl>>()));
    at::NoGradGuard no_grad;
    for (auto& p : model->parameters()) p.mul_(0.2);
    return model;
  };
  c.shard = [](FsdpContext& context, Model& model) {
    for (auto& unit : model->units) context.fully_shard(unit, {});
    context.fully_shard(model, {});
  };
  c.run_backward = [](Model& model, int rank) { model->forward(random({2, 256}, rank)).backward(); };
  c.tolerance = 1e-4;
  for (const auto& options : prefetches()) {
    c.context = options;
    c.context.inline_limit = Bytes(0);
    expect_equals_unsharded(c, {2, 3});
  }
}

TEST(CallPatterns, ModulesRegisteredTwiceAreOneUnitWithBothNames) {
  struct TwiceImpl : torch::nn::Module {
    TwiceImpl() {
      Pair a, b;
      for (auto& pair : {a, b, a}) list->push_back(pair);
      register_module("list", list);
    }
    at::Tensor forward(at::Tensor x) {
      for (auto& pair : *list) x = x + pair->as<Hooked<PairImpl>>()->forward(x);
      return x;
    }
    torch::nn::ModuleList list;
  };
  using Twice = torch::nn::ModuleHolder<Hooked<TwiceImpl>>;
  UnshardedCase<Twice> c;
  c.make = [] { return filled(Twice(std::make_shared<Hooked<TwiceImpl>>())); };
  c.shard = [](FsdpContext& context, Twice& model) {
    context.fully_shard(ModuleRef(model->list->ptr(0)), {});
    context.fully_shard(ModuleRef(model->list->ptr(1)), {});
    context.fully_shard(model, {});
  };
  c.run_backward = [](Twice& model, int rank) { model->forward(input(rank)).square().sum().backward(); };
  expect_equals_unsharded(c);
}

TEST(CallPatterns, TwoRootsShareAContext) {
  run_ranks(2, [](World world) {
    auto c = pairs({});
    auto context = FsdpContext::create(DeviceMesh(world, {{"dp", 2}}));
    auto actor = c.make(), critic = filled(Pairs(), 50);
    c.shard(*context, actor);
    c.shard(*context, critic);
    auto actor_reference = c.make(), critic_reference = filled(Pairs(), 50);
    const int rank = static_cast<int>(world.rank().value());
    for (int r = 0; r < 2; ++r) (critic_reference->forward(actor_reference->forward(input(r))).sum() / 2).backward();
    critic->forward(actor->forward(input(rank))).sum().backward();
    for (auto& item : actor_reference->named_parameters())
      EXPECT_TRUE(at::allclose(context->full_gradient(item.key()), item.value().grad(), 1e-5, 1e-6)) << item.key();
    for (auto& item : critic_reference->named_parameters())
      EXPECT_TRUE(at::allclose(context->full_gradient("#1/" + item.key()), item.value().grad(), 1e-5, 1e-6))
          << item.key();
    // One alone, then the other.
    actor->forward(input(rank)).sum().backward();
    critic->forward(input(rank)).sum().backward();
    EXPECT_EQ(context->memory_report().gathered, Bytes(0));
  });
}

}  // namespace
}  // namespace fsdp::testing
