// Recomputation: the same gradients, bit for bit, in every place where a recomputed function can stand.
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/linear.h>
#include <torch/autograd.h>
#include <torch/nn/modules/container/modulelist.h>

#include <map>

#include "tests/support/equals_unsharded.h"

namespace fsdp::testing {
namespace {

enum class Where { nowhere, around_each_unit, inside_each_unit, nested, around_two_units, around_the_model };

struct MlpImpl : torch::nn::Module {
  explicit MlpImpl(double p = 0)
      : up(register_module("up", fsdp::nn::Linear(4, 9))),
        down(register_module("down", fsdp::nn::Linear(9, 4))),
        drop(register_module("drop", fsdp::nn::Dropout(p))) {
    side = register_parameter("side", at::ones({4}));
  }
  at::Tensor inner(at::Tensor x) { return drop->forward(at::tanh(up->forward(x))); }
  at::Tensor forward(at::Tensor x, const at::Tensor& table) {
    dtypes.push_back(table.scalar_type());
    auto h = where == Where::inside_each_unit || where == Where::nested
                 ? fsdp::recompute([this](at::Tensor y) { return inner(y); }, x)
                 : inner(x);
    return x + down->forward(h) * side + table;
  }
  Where where = Where::nowhere;
  std::vector<at::ScalarType> dtypes;
  fsdp::nn::Linear up, down;
  fsdp::nn::Dropout drop;
  at::Tensor side;
};
FSDP_MODULE(Mlp);

struct MlpsImpl : torch::nn::Module {
  MlpsImpl(int depth, double p) {
    for (int i = 0; i < depth; ++i) layers->push_back(Mlp(p));
    register_module("layers", layers);
    out = register_parameter("out", at::ones({4}));
  }
  Hooked<MlpImpl>& layer(std::size_t i) { return *layers[i]->as<Hooked<MlpImpl>>(); }
  void set(Where value) {
    where = value;
    for (std::size_t i = 0; i < layers->size(); ++i) layer(i).where = value;
  }
  at::Tensor run(at::Tensor x, const at::Tensor& table, std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) x = layer(i).forward(x, table);
    return x;
  }
  at::Tensor forward(at::Tensor x, const at::Tensor& table) {
    const std::size_t step = where == Where::around_two_units                             ? 2
                             : where == Where::around_each_unit || where == Where::nested ? 1
                                                                                          : layers->size();
    if (step == layers->size()) {
      x = run(x, table, 0, step);
    } else {
      for (std::size_t i = 0; i < layers->size(); i += step) {
        x = fsdp::recompute(
            [this, i, step](at::Tensor y, at::Tensor t) { return run(y, t, i, std::min(i + step, layers->size())); }, x,
            table);
      }
    }
    return (x * out).sum();
  }
  at::Tensor loss(at::Tensor x, const at::Tensor& table) {
    if (where != Where::around_the_model) return forward(x, table);
    return fsdp::recompute([this](at::Tensor y, at::Tensor t) { return forward(y, t); }, x, table);
  }
  Where where = Where::nowhere;
  torch::nn::ModuleList layers;
  at::Tensor out;
};
FSDP_MODULE(Mlps);

struct Outcome {
  std::map<std::string, at::Tensor> gradients;
  ContextCounters counters;
};

Outcome run(int ranks, Where where, const ContextOptions& options, const UnitOptions& unit, double p,
            int microbatches = 1) {
  Outcome result;
  run_ranks(ranks,
            [&](World world) {
              auto context = FsdpContext::create(DeviceMesh(world, {{"dp", ranks}}), options);
              auto model = filled(Mlps(4, p));
              model->set(where);
              for (auto& layer : *model->layers) context->fully_shard(layer, unit);
              context->fully_shard(model, unit);
              const auto rank = static_cast<std::uint64_t>(world.rank().value());
              rank_generator().set_current_seed(10 + rank);
              for (int m = 0; m < microbatches; ++m) {
                auto scope = context->microbatch({.is_last = m + 1 == microbatches});
                fsdp::call(model, &MlpsImpl::loss, random({5, 4}, 20 + rank + 5 * m), random({4}, 7)).backward();
              }
              std::map<std::string, at::Tensor> gradients;
              for (auto& [name, leaf] : context->named_parameters()) gradients[name] = context->full_gradient(name);
              EXPECT_EQ(context->memory_report().gathered, Bytes(0));
              for (std::size_t i = 0; i < 4; ++i) {
                for (auto dtype : model->layer(i).dtypes)
                  EXPECT_EQ(dtype, unit.mixed_precision.param_dtype.value_or(at::kFloat));
              }
              if (rank == 0) result = {gradients, context->counters()};
            },
            {.deadline = std::chrono::seconds(30)});
  return result;
}

TEST(Recompute, GradientsAreEqualBitForBitWhereverItStands) {
  const std::vector<Where> places{Where::around_each_unit, Where::inside_each_unit, Where::nested,
                                  Where::around_two_units, Where::around_the_model};
  std::vector<ContextOptions> policies(4);
  policies[1].prefetch = Prefetch::none();
  policies[2].reduction = Reduction::delayed(1);
  policies[2].inline_limit = Bytes(0);
  policies[3].prefetch = Prefetch::recorded(1);
  std::vector<UnitOptions> units(3);
  units[1].placements = zero1("dp");
  units[2].mixed_precision = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
  for (double p : {0.0, 0.3}) {
    for (const auto& unit : units) {
      const Outcome plain = run(2, Where::nowhere, {}, unit, p);
      for (Where where : places) {
        for (const auto& options : policies) {
          const Outcome again = run(2, where, options, unit, p);
          for (const auto& [name, gradient] : plain.gradients) {
            EXPECT_TRUE(at::equal(again.gradients.at(name), gradient))
                << name << " place " << static_cast<int>(where) << " p " << p << " strategy " << unit.placements.name;
          }
          EXPECT_EQ(again.counters.reductions, plain.counters.reductions) << static_cast<int>(where);
        }
      }
    }
  }
}

TEST(Recompute, DropoutReallyDrops) {
  const Outcome some = run(1, Where::nowhere, {}, {}, 0.3), none = run(1, Where::nowhere, {}, {}, 0.0);
  EXPECT_FALSE(at::equal(some.gradients.at("layers.0.up.weight"), none.gradients.at("layers.0.up.weight")));
}

TEST(Recompute, AUnitIsGatheredOnceForItsSecondRunAndItsBackward) {
  ContextOptions options;
  options.prefetch = Prefetch::none();
  // Four units and the root: all in forward; in backward all but the root and, for keep_last, the last unit.
  EXPECT_EQ(run(2, Where::around_each_unit, options, {}, 0).counters.unshards, 5 + 3);
  EXPECT_EQ(run(2, Where::inside_each_unit, options, {}, 0).counters.unshards, 5 + 3);
  EXPECT_LE(run(2, Where::around_each_unit, options, {}, 0).counters.peak_gathered_units, 2);
  // Two units a function: the first is gathered for its second run and again for its backward.
  EXPECT_EQ(run(2, Where::around_two_units, options, {}, 0).counters.unshards, 5 + 3 + 2);
  EXPECT_LE(run(2, Where::around_two_units, options, {}, 0).counters.peak_gathered_units, 3);
}

TEST(Recompute, ReductionsAreIssuedAsTheBackwardGoesAlong) {
  for (Where where : {Where::around_each_unit, Where::around_the_model}) {
    auto recorder = std::make_shared<trace::Recorder>();
    ContextOptions options;
    options.recorder = recorder;
    (void)run(1, where, options, {}, 0);
    std::string order;
    for (const auto& span : recorder->spans()) {
      const std::string name = span.name;
      if (span.kind != trace::Kind::unit) continue;
      if (name.ends_with(":reduce_gradients")) order += name.substr(5, name.rfind(':') - 5) + " ";
    }
    EXPECT_EQ(order, "layers.3 layers.2 layers.1 layers.0 <root> ") << static_cast<int>(where);
  }
}

TEST(Recompute, MicrobatchesAddUp) {
  const Outcome plain = run(2, Where::nowhere, {}, {.placements = zero1("dp")}, 0.2, 3);
  const Outcome again = run(2, Where::around_each_unit, {}, {.placements = zero1("dp")}, 0.2, 3);
  for (const auto& [name, gradient] : plain.gradients)
    EXPECT_TRUE(at::equal(again.gradients.at(name), gradient)) << name;
}

TEST(Recompute, TwoForwardsBeforeOneBackward) {
  UnshardedCase<Mlps> c;
  c.make = [] {
    auto model = filled(Mlps(3, 0));
    model->set(Where::around_each_unit);
    return model;
  };
  c.shard = [](FsdpContext& context, Mlps& model) {
    for (auto& layer : *model->layers) context.fully_shard(layer, {});
    context.fully_shard(model, {});
  };
  c.run_backward = [](Mlps& model, int rank) {
    (model->forward(random({5, 4}, rank), random({4}, 7)) * model->forward(random({5, 4}, rank + 9), random({4}, 7)))
        .backward();
  };
  expect_equals_unsharded(c, {2});
}

TEST(Recompute, StructuresGoInAndOut) {
  const auto weight = random({4, 4}, 1).set_requires_grad(true);
  const auto x = random({2, 4}, 2).set_requires_grad(true);
  using Out = std::map<std::string, std::vector<at::Tensor>>;
  auto out = fsdp::recompute(
      [&](const std::vector<at::Tensor>& in, std::optional<at::Tensor> absent, int n) {
        EXPECT_FALSE(absent.has_value());
        return Out{{"a", {at::linear(in[0], weight) * n, in[0]}}, {"b", {in[1].argmax(1)}}};
      },
      std::vector<at::Tensor>{x, x * 2}, std::optional<at::Tensor>(), 3);
  EXPECT_FALSE(out.at("b")[0].requires_grad());
  EXPECT_FALSE(out.at("a")[1].is_same(x));
  (out.at("a")[0].sum() + out.at("a")[1].square().sum()).backward();
  const auto w = weight.detach().clone().set_requires_grad(true), z = x.detach().clone().set_requires_grad(true);
  ((at::linear(z, w) * 3).sum() + z.square().sum()).backward();
  EXPECT_TRUE(at::equal(weight.grad(), w.grad()));
  EXPECT_TRUE(at::equal(x.grad(), z.grad()));
}

void expect_refused(const std::function<void()>& action, const std::string& part) {
  try {
    action();
    ADD_FAILURE() << "not refused: " << part;
  } catch (const UsageError& error) {
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

TEST(Recompute, WhatItCannotDoIsRefused) {
  const auto w = random({4, 4}, 1).set_requires_grad(true);
  const auto x = random({2, 4}, 2).set_requires_grad(true);
  const auto f = [&](at::Tensor y) { return at::linear(y, w); };
  expect_refused([&] { (void)torch::autograd::grad({fsdp::recompute(f, x).sum()}, {x}); }, "autograd::grad");
  expect_refused([&] { fsdp::recompute(f, x).sum().backward({}, false, /*create_graph=*/true); }, "create_graph");
  expect_refused(
      [&] {
        auto y = x * 1;
        auto loss = fsdp::recompute(f, y).sum();
        y.add_(1);
        loss.backward();
      },
      "changed in place");
  int calls = 0;
  expect_refused(
      [&] {
        fsdp::recompute([&](at::Tensor y) { return at::linear(y, w).narrow(0, 0, 1 + calls++); }, x).sum().backward();
      },
      "other tensors than the first");
  auto loss = fsdp::recompute(f, x).sum();
  loss.backward({}, /*keep_graph=*/true);
  loss.backward();
  expect_refused([&] { loss.backward(); }, "graph was freed");
  at::NoGradGuard no_grad;
  EXPECT_FALSE(fsdp::recompute(f, x).requires_grad());
}

TEST(Recompute, AnExceptionInTheSecondRunReachesTheCallerAndResetRecovers) {
  run_ranks(
      2,
      [](World world) {
        auto context = FsdpContext::create(DeviceMesh(world, {{"dp", 2}}));
        auto model = filled(Mlps(3, 0));
        for (auto& layer : *model->layers) context->fully_shard(layer, {});
        context->fully_shard(model, {});
        const auto x = random({5, 4}, 1), table = random({4}, 7);
        int runs = 0;
        EXPECT_THROW(fsdp::recompute(
                         [&](at::Tensor y) {
                           if (++runs == 2) throw std::runtime_error("out of memory, say");
                           return model->forward(y, table);
                         },
                         x)
                         .backward(),
                     std::runtime_error);
        context->reset();
        model->set(Where::around_each_unit);
        model->forward(x, table).backward();
        auto reference = filled(Mlps(3, 0));
        reference->forward(x, table).backward();
        EXPECT_TRUE(at::allclose(context->full_gradient("layers.0.up.weight"), reference->layer(0).up->weight.grad()));
      },
      {.deadline = std::chrono::seconds(30)});
}

TEST(Recompute, RankThreadsHaveRandomNumbersOfTheirOwn) {
  std::vector<at::Tensor> first(3), again(3);
  for (auto* draws : {&first, &again}) {
    run_ranks(3, [&](World world) {
      const auto rank = world.rank().value();
      (*draws)[rank] = fsdp::dropout(at::ones({64}), 0.5, true);
    });
  }
  for (int rank = 0; rank < 3; ++rank) EXPECT_TRUE(at::equal(first[rank], again[rank]));
  EXPECT_FALSE(at::equal(first[0], first[1]));
  // One rank in a process: the default generator, so manual_seed acts on it.
  torch::manual_seed(5);
  const auto a = fsdp::dropout(at::ones({64}), 0.5, true);
  torch::manual_seed(5);
  EXPECT_TRUE(at::equal(fsdp::dropout(at::ones({64}), 0.5, true), a));
  EXPECT_NEAR(fsdp::dropout(at::ones({100000}), 0.25, true).mean().item<double>(), 1, 0.02);
}

}  // namespace
}  // namespace fsdp::testing
