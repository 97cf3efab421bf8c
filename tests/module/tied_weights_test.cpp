// Weights that several modules share, in one unit or across units: one slot, the sum of all uses, one value.
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/linear.h>
#include <torch/optim/sgd.h>

#include "tests/support/equals_unsharded.h"

namespace fsdp::testing {
namespace {

struct TableImpl : torch::nn::Module {
  TableImpl(std::int64_t rows, std::int64_t columns) {
    weight = register_parameter("weight", at::ones({rows, columns}));
  }
  at::Tensor forward(at::Tensor ids) { return at::embedding(weight, ids); }
  at::Tensor weight;
};
FSDP_MODULE(Table);

enum class Linear { plain, fused };

struct HeadImpl : torch::nn::Module {
  HeadImpl(std::int64_t rows, std::int64_t columns, Linear linear) : linear(linear) {
    weight = register_parameter("weight", at::ones({rows, columns}));
    bias = register_parameter("bias", at::ones({rows}));
  }
  at::Tensor forward(at::Tensor x) {
    return linear == Linear::fused ? fsdp::linear(x, weight, bias) : at::linear(x, weight, bias);
  }
  void tie(const at::Tensor& other) { weight = parameters_["weight"] = other; }
  at::Tensor weight, bias;
  Linear linear;
};
FSDP_MODULE(Head);

enum class Tie { same_tensor, same_memory };

struct TiedImpl : torch::nn::Module {
  TiedImpl(Tie tie, Linear linear)
      : table(register_module("table", Table(5, 4))),
        middle(register_module("middle", Head(4, 4, linear))),
        head(register_module("head", Head(5, 4, linear))) {
    head->tie(tie == Tie::same_tensor ? table->weight : table->weight.detach().set_requires_grad(true));
  }
  at::Tensor forward(at::Tensor ids) { return head->forward(middle->forward(table->forward(ids))); }
  Table table;
  Head middle, head;
};
FSDP_MODULE(Tied);

at::Tensor tied_loss(Tied& model, int rank) {
  const auto ids = at::arange(7, at::kLong).add_(rank).remainder_(5);
  return model->forward(ids).square().sum();
}

using ShardTied = std::function<void(FsdpContext&, Tied&, const UnitOptions&)>;

// Every way in which the two uses can fall into units.
std::vector<std::pair<std::string, ShardTied>> tied_units() {
  return {{"one unit", [](auto& c, auto& m, auto& o) { c.fully_shard(m, o); }},
          {"table lends to head",
           [](auto& c, auto& m, auto& o) {
             for (auto module : std::vector<ModuleRef>{m->table, m->middle, m->head, m}) c.fully_shard(module, o);
           }},
          {"head lends to table",
           [](auto& c, auto& m, auto& o) {
             for (auto module : std::vector<ModuleRef>{m->head, m->middle, m->table, m}) c.fully_shard(module, o);
           }},
          {"head lends to the root",
           [](auto& c, auto& m, auto& o) {
             for (auto module : std::vector<ModuleRef>{m->head, m->middle, m}) c.fully_shard(module, o);
           }},
          {"grouped", [](auto& c, auto& m, auto& o) {
             c.fully_shard({m->table, m->head}, o);
             c.fully_shard(m, o);
           }}};
}

TEST(TiedWeights, AcrossUnitsGetTheSumOfBothUses) {
  for (const auto& [name, shard] : tied_units()) {
    for (Tie tie : {Tie::same_tensor, Tie::same_memory}) {
      for (Linear linear : {Linear::plain, Linear::fused}) {
        for (const auto& prefetch : {Prefetch::depth(1), Prefetch::none(), Prefetch::delayed_release(2)}) {
          SCOPED_TRACE(fmt::format("{} {} {} {}", name, static_cast<int>(tie), static_cast<int>(linear),
                                   static_cast<int>(prefetch.kind)));
          UnshardedCase<Tied> c;
          c.make = [=] { return filled(Tied(tie, linear)); };
          c.shard = [&](FsdpContext& context, Tied& model) { shard(context, model, {}); };
          c.run_backward = [](Tied& model, int rank) { tied_loss(model, rank).backward(); };
          c.context.prefetch = prefetch;
          if (tie == Tie::same_tensor) {
            expect_equals_unsharded(c);
            continue;
          }
          // Autograd counts the two tensors apart: the sum of both is expected.
          for (int ranks : {1, 2}) {
            Gradients expected = mean_gradients(c, ranks);
            const auto sum = expected.at("table.weight") + expected.at("head.weight");
            expected["table.weight"] = expected["head.weight"] = sum;
            run_ranks(ranks, [&](World world) {
              auto context = FsdpContext::create(DeviceMesh(world, {{"dp", ranks}}), c.context);
              auto model = c.make();
              shard(*context, model, {});
              tied_loss(model, static_cast<int>(world.rank().value())).backward();
              expect_gradients(*context, expected, 1e-5, name);
              std::int64_t training = 0;  // each is reduced once, whatever the number of uses
              for (const auto& unit : context->units()) training += unit->groups().empty() ? 0 : 1;
              EXPECT_EQ(context->counters().reductions, training);
            });
          }
        }
      }
    }
  }
}

// The parent reads the weight after the child that owns it has dropped it for its own part.
struct TailImpl : torch::nn::Module {
  TailImpl()
      : table(register_module("table", Table(5, 4))), middle(register_module("middle", Head(4, 4, Linear::plain))) {
    out = register_parameter("out", table->weight);
  }
  at::Tensor forward(at::Tensor ids) { return at::linear(middle->forward(table->forward(ids)), out); }
  Table table;
  Head middle;
  at::Tensor out;
};
FSDP_MODULE(Tail);

TEST(TiedWeights, StayGatheredWhileAnyUnitThatUsesThemIs) {
  for (const auto& prefetch : {Prefetch::depth(1), Prefetch::none(), Prefetch::delayed_release(1)}) {
    UnshardedCase<Tail> c;
    c.make = [] { return filled(Tail()); };
    c.shard = [](FsdpContext& context, Tail& model) {
      for (auto module : std::vector<ModuleRef>{model->table, model->middle, model}) context.fully_shard(module, {});
    };
    c.run_backward = [](Tail& model, int rank) {
      model->forward(at::arange(7, at::kLong).add_(rank).remainder_(5)).square().sum().backward();
    };
    c.context.prefetch = prefetch;
    expect_equals_unsharded(c);
  }
}

TEST(TiedWeights, TrainInEveryStrategyAndStayTied) {
  for (const auto& strategy : {ddp("dp"), zero1("dp"), zero2("dp"), zero3("dp")}) {
    for (const auto& [name, shard] : tied_units()) {
      SCOPED_TRACE(strategy.name + " " + name);
      auto reference = filled(Tied(Tie::same_tensor, Linear::fused));
      // LibTorch lists a shared tensor once per owner, and its optimizers would step it as often.
      torch::optim::SGD reference_optimizer(
          {reference->table->weight, reference->middle->weight, reference->middle->bias, reference->head->bias}, 0.05);
      for (int step = 0; step < 3; ++step) {
        reference_optimizer.zero_grad();
        ((tied_loss(reference, 0) + tied_loss(reference, 1)) / 2).backward();
        reference_optimizer.step();
      }
      run_ranks(2, [&](World world) {
        auto context = FsdpContext::create(DeviceMesh(world, {{"dp", 2}}));
        auto model = filled(Tied(Tie::same_tensor, Linear::fused));
        shard(*context, model, {.placements = strategy});
        torch::optim::SGD optimizer(context->parameters(), 0.05);
        EXPECT_EQ(context->parameters().size(), 4u);  // one slot, one entry for the optimizer
        for (int step = 0; step < 3; ++step) {
          optimizer.zero_grad();
          tied_loss(model, static_cast<int>(world.rank().value())).backward();
          optimizer.step();
        }
        for (const auto& item : reference->named_parameters()) {
          const auto value = context->full_parameter(item.key());
          EXPECT_TRUE(at::allclose(value, item.value(), 1e-5, 1e-6)) << item.key();
        }
        EXPECT_TRUE(at::equal(context->full_parameter("table.weight"), context->full_parameter("head.weight")));
        at::NoGradGuard no_grad;
        EXPECT_NEAR(tied_loss(model, 3).item<double>(), tied_loss(reference, 3).item<double>(), 1e-3);
      });
    }
  }
}

TEST(TiedWeights, BuiltOnMetaStayTiedWhenMaterialized) {
  run_ranks(2, [](World world) {
    auto context = FsdpContext::create(DeviceMesh(world, {{"dp", 2}}));
    Tied model(Tie::same_tensor, Linear::plain);
    for (auto& parameter : model->parameters()) {
      const at::Tensor meta = at::empty(parameter.sizes(), parameter.options().device(at::kMeta));
      parameter.unsafeGetTensorImpl()->shallow_copy_from(meta.getIntrusivePtr());
    }
    tied_units()[1].second(*context, model, {});
    context->materialize([](const std::string&, at::Tensor& whole, at::Generator& g) { whole.normal_(0, 0.4, g); });
    EXPECT_TRUE(model->head->weight.is_same(model->table->weight));
    const auto values = context->full_parameter("head.weight");
    auto reference = Tied(Tie::same_tensor, Linear::plain);
    {
      at::NoGradGuard no_grad;
      for (auto& item : reference->named_parameters()) item.value().copy_(context->full_parameter(item.key()));
    }
    tied_loss(reference, 1).backward();
    tied_loss(model, 1).backward();
    EXPECT_TRUE(at::allclose(context->full_gradient("head.weight"), reference->table->weight.grad(), 1e-5, 1e-5));
  });
}

TEST(TiedWeights, TensorsThatOverlapWithoutBeingOneAreRefused) {
  struct OverlapImpl : torch::nn::Module {
    OverlapImpl() {
      const auto memory = at::ones({6});
      register_parameter("a", memory.narrow(0, 0, 4));
      register_parameter("b", memory.narrow(0, 2, 4));
    }
    at::Tensor forward(at::Tensor x) { return x; }
  };
  auto context = FsdpContext::create(DeviceMesh(World::single(), {{"dp", 1}}));
  auto model = std::make_shared<Hooked<OverlapImpl>>();
  try {
    context->fully_shard(model, {});
    ADD_FAILURE() << "not refused";
  } catch (const UsageError& error) {
    EXPECT_NE(std::string(error.what()).find("\"a\" (Float of 4) and \"b\" (Float of 4) overlap"), std::string::npos)
        << error.what();
  }
}

TEST(TiedWeights, TiesMadeAfterShardingAreNamed) {
  // At the first forward.
  run_ranks(1, [](World world) {
    auto context = FsdpContext::create(DeviceMesh(world, {{"dp", 1}}));
    auto model = filled(Tied(Tie::same_tensor, Linear::plain));
    tied_units()[1].second(*context, model, {});
    model->middle->tie(at::ones({4, 4}).set_requires_grad(true));
    try {
      (void)tied_loss(model, 0);
      ADD_FAILURE() << "not refused";
    } catch (const UsageError& error) {
      EXPECT_NE(std::string(error.what()).find("is not the tensor that was sharded"), std::string::npos)
          << error.what();
    }
  });
  // Later, in check mode.
  run_ranks(1, [](World world) {
    auto context = FsdpContext::create(DeviceMesh(world, {{"dp", 1}}), {.check = true});
    auto model = filled(Tied(Tie::same_tensor, Linear::plain));
    tied_units()[1].second(*context, model, {});
    tied_loss(model, 0).backward();
    model->middle->tie(at::ones({4, 4}).set_requires_grad(true));
    EXPECT_THROW((void)tied_loss(model, 0), UsageError);
  });
}

}  // namespace
}  // namespace fsdp::testing
