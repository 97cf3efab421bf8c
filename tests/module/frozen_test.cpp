// Units that do not train, or not yet, or no longer, and units whose backward does not read their weights: what is
// gathered and reduced for them. The right value is always that of an unsharded run.
#include <ATen/TensorOperators.h>
#include <ATen/ops/linear.h>
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
    if (gain.defined()) x = x * gain;
    return x;
  }
  torch::nn::ModuleList layers;
  at::Tensor gain;  // of the root itself; may be undefined
  bool recomputes = false;
  int beside = -1;  // layer whose result is added to its input, and not in place of it
  bool detaches = false;
};
FSDP_MODULE(Adapters);

void shard_adapters(FsdpContext& context, Adapters& model, const UnitOptions& options = {}) {
  for (auto& layer : *model->layers) context.fully_shard(layer, options);
  context.fully_shard(model, options);
}

TEST(Frozen, FrozenBaseWithAdaptersInOneUnitTrainsTheAdaptersOnly) {
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

TEST(Frozen, FrozenWeightsAreNeverReducedAndTheirGathersAreCounted) {
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

TEST(Frozen, UnitsWithoutTrainableWeightsDropThemDuringBackward) {
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
TEST(Frozen, AFrozenBaseIsGatheredOnceAMicrobatchOrOnceAStep) {
  constexpr int kDepth = 4, kMicrobatches = 3;
  const auto gathers = [&](Reshard reshard, Prefetch prefetch, bool root_trains, std::vector<at::Tensor>& gradients) {
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
      if (root_trains) model->gain = model->register_parameter("gain", at::ones({6}));
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
    EXPECT_EQ(gathers(Reshard::after_forward, prefetch, false, dropped), kDepth * kMicrobatches);
    EXPECT_EQ(gathers(Reshard::never, prefetch, false, kept), kDepth - 1 + kMicrobatches);
    // The root too, once a microbatch and, dropped after its forward, twice.
    std::vector<at::Tensor> ignored;
    EXPECT_EQ(gathers(Reshard::never, prefetch, true, ignored), kDepth - 1 + 2 * kMicrobatches);
    ASSERT_EQ(dropped.size(), kept.size());
    ASSERT_FALSE(kept.empty());
    for (std::size_t i = 0; i < kept.size(); ++i) EXPECT_TRUE(at::equal(kept[i], dropped[i]));
  }
}

// Kept frozen units behind one that trains: also when each is run again in backward.
TEST(Frozen, FrozenUnitsThatStayDoSoUnderRecomputation) {
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
TEST(Frozen, RanksWhoseInputsRequireOtherGradientsGatherInOneOrder) {
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

TEST(Frozen, UnfrozenLaterEqualsNeverFrozen) {
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

TEST(Frozen, FrozenLaterStopsGradientsOfThatParameterOnly) {
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

struct TwoTablesImpl : torch::nn::Module {
  explicit TwoTablesImpl(bool both)
      : table(register_module("table", std::make_shared<HookedEmbedding>(7, 6))),
        other(register_module("other", std::make_shared<HookedEmbedding>(7, 6))),
        last(register_module("last", Adapter(6))),
        both(both) {}
  at::Tensor forward(at::Tensor tokens) {
    at::Tensor x = table->forward(tokens);
    if (both) x = x + fsdp::recompute([this](at::Tensor t) { return other->forward(t); }, tokens);
    return last->forward(x);
  }
  std::shared_ptr<HookedEmbedding> table, other;
  Adapter last;
  bool both;
};
FSDP_MODULE(TwoTables);

at::Tensor tokens_of(int rank) { return at::tensor({0, 3, 6, 3, rank}, at::kLong); }

TEST(Embeddings, AnEmbeddingIsGatheredForForwardOnly) {
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
        // The table, the first adapter twice, the last once; and the table again where others might recompute it.
        const int gathers = skipped == SkippedUnits::error ? 4 : 5;
        for (int step = 1; step <= 3; ++step) {
          model->forward(tokens_of(0)).sum().backward();
          context->weights_changed();
          EXPECT_EQ(context->counters().unshards, gathers * step);
          EXPECT_EQ(context->counters().reductions, 3 * step);
        }
      });
    }
  }
}

// One rank recomputes an embedding that the other skips: it gathers it in backward, and the other takes part.
TEST(Embeddings, RecomputedOnOneRankAndSkippedOnAnother) {
  for (const auto& prefetch : {Prefetch::none(), Prefetch::depth(1)}) {
    run_ranks(2,
              [&](World world) {
                auto context = FsdpContext::create(DeviceMesh(world, {{"dp", 2}}),
                                                   {.prefetch = prefetch, .skipped_units = SkippedUnits::participate});
                auto model = filled(TwoTables(world.rank().value() == 0));
                for (const ModuleRef& unit : {ModuleRef(model->table), ModuleRef(model->other), ModuleRef(model->last)})
                  context->fully_shard(unit);
                context->fully_shard(model);
                for (int step = 0; step < 3; ++step) {
                  model->forward(tokens_of(0)).sum().backward();
                  context->weights_changed();
                }
                EXPECT_EQ(context->memory_report().gathered, Bytes(0));
              },
              {.deadline = std::chrono::seconds(20)});
  }
}

// A type of the user's own may read its weight in backward.
struct ScaledEmbeddingImpl : torch::nn::EmbeddingImpl {
  ScaledEmbeddingImpl() : torch::nn::EmbeddingImpl(7, 6) {}
  at::Tensor forward(at::Tensor tokens) { return torch::nn::EmbeddingImpl::forward(tokens) * weight.sum(); }
};

TEST(Embeddings, TypesDerivedFromThemAreGatheredForBackward) {
  run_ranks(2, [](World world) {
    auto context =
        FsdpContext::create(DeviceMesh(world, {{"dp", 2}}), {.prefetch = Prefetch::none(), .keep_last = false});
    UnitOptions unit;
    unit.reshard = Reshard::after_forward;
    auto table = std::make_shared<fsdp::Hooked<ScaledEmbeddingImpl>>();
    context->fully_shard(table, unit);
    table->forward(tokens_of(0)).sum().backward();
    EXPECT_EQ(context->counters().unshards, 2);
  });
}

TEST(Embeddings, RenormalizationInForwardIsRefused) {
  run_ranks(2, [](World world) {
    auto context = FsdpContext::create(DeviceMesh(world, {{"dp", 2}}));
    const auto table = std::make_shared<HookedEmbedding>(torch::nn::EmbeddingOptions(7, 6).max_norm(1.0));
    try {
      context->fully_shard(table);
      ADD_FAILURE() << "was accepted";
    } catch (const UsageError& error) {
      EXPECT_THAT(error.what(), ::testing::HasSubstr("max_norm = 1"));
    }
  });
}

TEST(Embeddings, BackwardsThatReadWeightsAllTheSameAreRefused) {
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

}  // namespace
}  // namespace fsdp::testing
