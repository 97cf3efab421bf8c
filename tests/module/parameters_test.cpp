// Which parameters a unit may hold: frozen, unused, late, of several dtypes and odd shapes (tied:
// tied_weights_test.cpp). The right value is always that of an unsharded run.
#include <ATen/TensorOperators.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/tensor.h>
#include <gmock/gmock.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <chrono>

#include "tests/support/equals_unsharded.h"

namespace fsdp::testing {
namespace {

// --- Frozen ---

struct AdapterImpl : torch::nn::Module {
  explicit AdapterImpl(std::int64_t width, bool adapt = true) : adapt(adapt) {
    base = register_parameter("base", at::ones({width, width}), /*requires_grad=*/false);
    down = register_parameter("down", at::ones({2, width}), adapt);
    up = register_parameter("up", at::ones({width, 2}), adapt);
  }
  at::Tensor forward(at::Tensor x) { return fsdp::linear(x, base) + at::linear(at::linear(x, down), up); }
  at::Tensor base, down, up;
  bool adapt;
};
FSDP_MODULE(Adapter);

struct AdaptersImpl : torch::nn::Module {
  AdaptersImpl(int depth, std::int64_t width, int trained) {
    for (int i = 0; i < depth; ++i) layers->push_back(Adapter(width, i % trained == 0));
    register_module("layers", layers);
  }
  at::Tensor forward(at::Tensor x) {
    for (std::size_t i = 0; i < layers->size(); ++i) {
      auto* adapter = (*layers)[i]->as<fsdp::Hooked<AdapterImpl>>();
      const auto run = [adapter](at::Tensor y) { return adapter->forward(y).tanh(); };
      if (static_cast<int>(i) == beside)
        x = x + run(detaches ? x.detach() : x) * 0.5;
      else
        x = recomputes ? fsdp::recompute(run, x) : run(x);
    }
    return x;
  }
  torch::nn::ModuleList layers;
  bool recomputes = false;
  int beside = -1;  // layer whose result is added to its input, and not in place of it
  bool detaches = false;
};
FSDP_MODULE(Adapters);

void shard_adapters(FsdpContext& context, Adapters& model, const UnitOptions& options = {}) {
  for (auto& layer : *model->layers) context.fully_shard(layer, options);
  context.fully_shard(model, options);
}

TEST(Parameters, FrozenBaseWithAdaptersInOneUnitTrainsTheAdaptersOnly) {
  for (int depth : {8, 16}) {
    for (int trained : {1, 3}) {  // every unit has adapters that train; every third
      UnshardedCase<Adapters> c;
      c.make = [=] { return filled(Adapters(depth, 6, trained)); };
      c.shard = [](FsdpContext& context, Adapters& model) { shard_adapters(context, model); };
      c.run_backward = [](Adapters& model, int rank) { model->forward(random({3, 6}, 50 + rank)).sum().backward(); };
      expect_equals_unsharded(c, {2});
    }
  }
}

TEST(Parameters, FrozenWeightsAreNeverReducedAndTheirGathersAreCounted) {
  for (int depth : {8, 16}) {
    auto recorder = std::make_shared<trace::Recorder>();
    run_ranks(2, [&](World world) {
      ContextOptions options;
      if (world.rank().value() == 0) options.recorder = recorder;
      auto context = FsdpContext::create(DeviceMesh(world, {{"dp", 2}}), options);
      auto model = filled(Adapters(depth, 128, 1));
      shard_adapters(*context, model);
      model->forward(random({3, 128}, 1)).sum().backward();
      EXPECT_EQ(context->counters().unshards, 2 * depth - 1);  // the last one stays for its backward
      EXPECT_EQ(context->counters().reductions, depth);
      Bytes gradients, weights;
      for (auto* group : context->groups()) {
        weights += group->main_bytes();
        gradients += group->gradient_bytes();
      }
      EXPECT_EQ(gradients, Bytes(depth * 2 * 128 * 2 * 4 / 2));  // two adapters of 2 x 128, over two ranks
      EXPECT_GT(weights, gradients * 10);
    });
    std::int64_t reduced = 0;
    for (const auto& span : recorder->spans()) {
      if (span.kind == trace::Kind::reduce_scatter) reduced += span.bytes;
    }
    EXPECT_EQ(reduced, depth * 2 * 128 * 2 * 4);
  }
}

TEST(Parameters, UnitsWithoutTrainableWeightsDropThemDuringBackward) {
  run_ranks(2, [](World world) {
    ContextOptions options;
    options.prefetch = Prefetch::none();
    auto context = FsdpContext::create(DeviceMesh(world, {{"dp", 2}}), options);
    auto model = filled(Adapters(8, 6, 100));  // only the first layer trains
    shard_adapters(*context, model);
    context->reset_peaks();
    model->forward(random({3, 6}, 1)).sum().backward();
    EXPECT_LE(context->counters().peak_gathered_units, 2);
  });
}

// No backward passes through the units before the first one that trains.
TEST(Parameters, AFrozenBaseIsGatheredOnceAMicrobatchOrOnceAStep) {
  constexpr int kDepth = 4, kMicrobatches = 3;
  const auto gathers = [&](Reshard reshard, Prefetch prefetch, std::vector<at::Tensor>& gradients) {
    std::int64_t seen = 0;
    run_ranks(2, [&](World world) {
      ContextOptions options;
      options.prefetch = prefetch;
      auto context = FsdpContext::create(DeviceMesh(world, {{"dp", 2}}), options);
      auto model = filled(Adapters(kDepth, 6, 1));
      for (int i = 0; i + 1 < kDepth; ++i) {
        for (auto& parameter : (*model->layers)[static_cast<std::size_t>(i)]->parameters())
          parameter.set_requires_grad(false);
      }
      UnitOptions unit;
      unit.reshard = reshard;
      shard_adapters(*context, model, unit);
      for (int step = 0; step < 2; ++step) {
        const auto before = context->counters().unshards;
        for (int micro = 0; micro < kMicrobatches; ++micro) {
          auto scope = context->microbatch({.is_last = micro + 1 == kMicrobatches});
          model->forward(random({3, 6}, static_cast<std::uint64_t>(micro))).sum().backward();
        }
        if (world.rank().value() == 0) seen = context->counters().unshards - before;
        context->weights_changed();
      }
      EXPECT_EQ(context->memory_report().gathered, Bytes(0));
      if (world.rank().value() != 0) return;
      for (const auto& leaf : context->parameters()) {
        if (leaf.grad().defined()) gradients.push_back(leaf.grad().clone());
      }
    });
    return seen;
  };
  for (const auto& prefetch : {Prefetch::none(), Prefetch::depth(1), Prefetch::depth(2), Prefetch::recorded()}) {
    std::vector<at::Tensor> dropped, kept;
    EXPECT_EQ(gathers(Reshard::after_forward, prefetch, dropped), kDepth * kMicrobatches);
    EXPECT_EQ(gathers(Reshard::never, prefetch, kept), kDepth - 1 + kMicrobatches);
    ASSERT_EQ(dropped.size(), kept.size());
    ASSERT_FALSE(kept.empty());
    for (std::size_t i = 0; i < kept.size(); ++i) EXPECT_TRUE(at::equal(kept[i], dropped[i]));
  }
}

// Kept frozen units behind one that trains: also when each is run again in backward.
TEST(Parameters, FrozenUnitsThatStayDoSoUnderRecomputation) {
  constexpr int kDepth = 5, kMicrobatches = 3;
  for (const bool recomputes : {false, true}) {
    run_ranks(2, [&](World world) {
      auto context = FsdpContext::create(DeviceMesh(world, {{"dp", 2}}));
      auto model = filled(Adapters(kDepth, 6, kDepth));  // the first one trains
      model->recomputes = recomputes;
      UnitOptions unit;
      unit.reshard = Reshard::never;
      shard_adapters(*context, model, unit);
      for (int micro = 0; micro < kMicrobatches; ++micro) {
        auto scope = context->microbatch({.is_last = micro + 1 == kMicrobatches});
        model->forward(random({3, 6}, static_cast<std::uint64_t>(micro))).sum().backward();
      }
      // The first one goes after its backward, the others after the last microbatch's.
      EXPECT_EQ(context->counters().unshards, kDepth - 1 + kMicrobatches) << recomputes;
    });
  }
}

// A frozen unit in the middle that gets an input without gradients on one rank: gathers keep their order on all.
TEST(Parameters, RanksWhoseInputsRequireOtherGradientsGatherInOneOrder) {
  for (const auto& prefetch : {Prefetch::depth(1), Prefetch::depth(2)}) {
    run_ranks(2,
              [&](World world) {
                auto context = FsdpContext::create(DeviceMesh(world, {{"dp", 2}}), {.prefetch = prefetch});
                auto model = filled(Adapters(4, 6, 1));
                for (auto& parameter : (*model->layers)[2]->parameters()) parameter.set_requires_grad(false);
                shard_adapters(*context, model);
                model->beside = 2;
                model->detaches = world.rank().value() == 1;
                for (int step = 0; step < 2; ++step) {
                  model->forward(random({3, 6}, 1)).sum().backward();
                  context->weights_changed();
                }
              },
              {.deadline = std::chrono::seconds(20)});  // ranks in different orders would wait for each other
  }
}

// --- Weights that backward does not read ---

using HookedEmbedding = fsdp::Hooked<torch::nn::EmbeddingImpl>;

struct EmbeddedImpl : torch::nn::Module {
  EmbeddedImpl()
      : table(register_module("table", std::make_shared<HookedEmbedding>(7, 6))),
        first(register_module("first", Adapter(6))),
        second(register_module("second", Adapter(6))) {}
  at::Tensor forward(at::Tensor tokens) { return second->forward(first->forward(table->forward(tokens)).tanh()); }
  std::shared_ptr<HookedEmbedding> table;
  Adapter first, second;
};
FSDP_MODULE(Embedded);

at::Tensor tokens_of(int rank) { return at::tensor({0, 3, 6, 3, rank}, at::kLong); }

TEST(Parameters, AnEmbeddingIsGatheredForForwardOnly) {
  UnshardedCase<Embedded> c;
  c.make = [] { return filled(Embedded()); };
  c.shard = [](FsdpContext& context, Embedded& model) {
    for (const ModuleRef& unit : {ModuleRef(model->table), ModuleRef(model->first), ModuleRef(model->second)})
      context.fully_shard(unit);
    context.fully_shard(model);
  };
  c.run_backward = [](Embedded& model, int rank) { model->forward(tokens_of(rank)).sum().backward(); };
  expect_equals_unsharded(c, {2});
  for (const auto& prefetch : {Prefetch::none(), Prefetch::depth(1), Prefetch::recorded(2)}) {
    for (const auto skipped : {SkippedUnits::error, SkippedUnits::participate}) {
      if (skipped == SkippedUnits::participate && prefetch.kind == Prefetch::Kind::recorded) continue;  // refused
      run_ranks(2, [&](World world) {
        auto context =
            FsdpContext::create(DeviceMesh(world, {{"dp", 2}}), {.prefetch = prefetch, .skipped_units = skipped});
        auto model = c.make();
        c.shard(*context, model);
        for (int step = 1; step <= 3; ++step) {
          model->forward(tokens_of(0)).sum().backward();
          context->weights_changed();
          EXPECT_EQ(context->counters().unshards, 4 * step);  // the table, the first adapter twice, the last once
          EXPECT_EQ(context->counters().reductions, 3 * step);
        }
      });
    }
  }
}

TEST(Parameters, BackwardsThatReadWeightsAllTheSameAreRefused) {
  run_ranks(2, [](World world) {
    auto context = FsdpContext::create(DeviceMesh(world, {{"dp", 2}}));
    auto model = filled(Adapters(3, 6, 1));
    UnitOptions unit;
    unit.backward_reads_weights = false;
    shard_adapters(*context, model, unit);
    try {
      model->forward(random({3, 6}, 1).requires_grad_()).sum().backward();
      ADD_FAILURE() << "weights that were not gathered were used";
    } catch (const std::exception& error) {
      EXPECT_THAT(error.what(), ::testing::AllOf(::testing::HasSubstr("was read while it is sharded"),
                                                 ::testing::HasSubstr("set UnitOptions::backward_reads_weights")));
    }
    context->reset();
  });
}

TEST(Parameters, UnfrozenLaterEqualsNeverFrozen) {
  for (bool own : {false, true}) {
    for (const auto& strategy : {zero1("dp"), zero3("dp")}) {
      std::map<std::string, at::Tensor> never;
      for (bool frozen_first : {false, true}) {
        run_ranks(2, [&](World world) {
          auto context = FsdpContext::create(DeviceMesh(world, {{"dp", 2}}));
          auto model = make_toy_model();
          auto* block = model->blocks[1]->as<ToyBlockImpl>();
          const std::vector<at::Tensor> late{block->up->weight, block->gain, model->exit->bias};
          if (frozen_first) {
            for (auto& p : late) p.set_requires_grad(false);
          }
          shard_toy_model(
              *context, model,
              {.placements = strategy, .mixed_precision = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}});
          std::unique_ptr<torch::optim::AdamW> torch_optimizer;
          std::unique_ptr<AdamW> own_optimizer;
          if (own)
            own_optimizer = std::make_unique<AdamW>(*context, AdamWOptions{});
          else
            torch_optimizer = std::make_unique<torch::optim::AdamW>(context->parameters());
          const int rank = static_cast<int>(world.rank().value());
          (void)toy_loss(model, 1 + rank);  // the first forward, with them frozen
          for (auto p : late) p.set_requires_grad(true);
          for (int step = 0; step < 3; ++step) {
            toy_loss(model, 10 * step + rank).backward();
            own ? own_optimizer->step() : (void)torch_optimizer->step();
            own ? own_optimizer->zero_grad() : torch_optimizer->zero_grad();
          }
          for (auto& [name, leaf] : context->named_parameters()) {
            EXPECT_TRUE(leaf.requires_grad()) << name;
            const auto value = context->full_parameter(name);
            if (rank != 0) continue;
            if (!frozen_first) never[name] = value;
            EXPECT_TRUE(at::equal(value, never.at(name))) << name << " own " << own << " " << strategy.name;
          }
        });
      }
    }
  }
}

TEST(Parameters, FrozenLaterStopsGradientsOfThatParameterOnly) {
  run_toy(2, [](ToyRank& r) {
    toy_loss(r.model, 1).backward();
    for (auto& p : r.context->parameters()) p.mutable_grad().reset();
    auto reference = make_toy_model();
    for (auto* model : {&reference, &r.model}) (*model)->blocks[0]->as<ToyBlockImpl>()->gain.set_requires_grad(false);
    toy_loss(reference, 2).backward();
    toy_loss(r.model, 2).backward();
    Gradients expected;
    for (auto& item : reference->named_parameters()) expected[item.key()] = item.value().grad();
    for (auto& [name, gradient] : expected) gradient = gradient.defined() ? gradient.to(at::kDouble) : gradient;
    expect_gradients(*r.context, expected, 1e-5, "frozen later");
    EXPECT_EQ(r.context->counters().peak_reduce_slots, 2);
  });
}

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
