// Mixture-of-experts training over expert-parallel ranks: the merged schedule against the sequential one, and sharded
// runs against one process that does every rank's part.
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "fsdp/fsdp.h"
#include "fsdp/pipeline/step_driver.h"
#include "models/moe_transformer.h"
#include "tests/support/ranks.h"
#include "tests/support/train.h"

namespace fsdp::testing {
namespace {

using pipeline::Microbatch;
using pipeline::Schedule;
using pipeline::StepDriver;
using pipeline::StepOptions;

models::MoeConfig small(int layers, int dense_layers = 0) {
  models::MoeConfig config;
  config.base = {
      .vocabulary = 40, .layers = layers, .width = 16, .heads = 2, .kv_heads = 1, .ffn_width = 24, .max_context = 32};
  config.experts = 4;
  config.top_k = 2;
  config.expert_width = 12;
  config.shared_width = 20;
  config.dense_layers = dense_layers;
  return config;
}

Microbatch batch(std::uint64_t seed, std::int64_t vocabulary = 40) {
  auto generator = at::detail::createCPUGenerator(seed);
  const auto tokens = at::randint(vocabulary, {2, 9}, generator, at::TensorOptions().dtype(at::kLong));
  return {{tokens.narrow(1, 0, 8)}, {tokens.narrow(1, 1, 8).contiguous()}};
}

std::vector<Microbatch> batches(int count, std::uint64_t seed) {
  std::vector<Microbatch> all;
  for (int m = 0; m < count; ++m) all.push_back(batch(seed + static_cast<std::uint64_t>(m)));
  return all;
}

void on_ranks(int ranks, const std::function<void(World)>& body) {
  run_on_ranks(ranks, [&](World world, SideChannel&) { body(std::move(world)); });
}

struct MoeRun {
  MoeRun(World world, int expert_ranks, const models::MoeConfig& config, const StepOptions& options,
         const UnitOptions& unit = {}, const ContextOptions& context_options = {}, std::uint64_t seed = 5)
      : MoeRun(DeviceMesh(world, {{"edp", world.size() / expert_ranks}, {"ep", expert_ranks}}), config, options, unit,
               context_options, seed) {}
  MoeRun(const DeviceMesh& of, const models::MoeConfig& config, const StepOptions& options, const UnitOptions& unit,
         const ContextOptions& context_options, std::uint64_t seed = 5)
      : mesh(of),
        model(std::make_shared<models::MoeTransformer>(config, mesh)),
        context(FsdpContext::create(mesh, context_options)) {
    model->shard(*context, unit);
    context->materialize(model->initializer(), {.seed = seed});
    driver = std::make_unique<StepDriver>(context, model, options);
  }
  std::map<std::string, at::Tensor> gradients() {
    std::map<std::string, at::Tensor> all;
    for (auto& [name, leaf] : context->named_parameters()) all[name] = context->full_gradient(name);
    return all;
  }
  std::map<std::string, at::Tensor> weights() {
    std::map<std::string, at::Tensor> all;
    for (auto& [name, leaf] : context->named_parameters()) all[name] = context->full_parameter(name);
    return all;
  }
  void zero_grad() {
    for (auto* group : context->groups()) group->zero_gradients(true);
  }
  DeviceMesh mesh;
  std::shared_ptr<models::MoeTransformer> model;
  std::shared_ptr<FsdpContext> context;
  std::unique_ptr<StepDriver> driver;
};

void expect_equal_maps(const std::map<std::string, at::Tensor>& a, const std::map<std::string, at::Tensor>& b,
                       const std::string& what) {
  ASSERT_EQ(a.size(), b.size());
  for (const auto& [name, value] : a)
    EXPECT_TRUE(at::equal(value, b.at(name)))
        << what << ": " << name << " differs by " << (value - b.at(name)).abs().max().item<double>();
}

// C1: same losses and gradients, bit for bit.
TEST(MoeSchedule, MergedEqualsSequentialBitForBit) {
  for (const int layers : {1, 2, 3}) {
    for (const int dense : {0, 1}) {
      if (dense >= layers && layers > 1) continue;
      on_ranks(2, [&](World world) {
        const auto rank = static_cast<std::uint64_t>(world.rank().value());
        MoeRun reference(world, 2, small(layers, dense), {.schedule = Schedule::sequential, .delay_weights = false});
        for (const int microbatches : {1, 2, 4}) {
          const auto losses = reference.driver->run(batches(microbatches, 100 * rank));
          const auto expected = reference.gradients();
          reference.zero_grad();
          for (const bool delay : {false, true}) {
            for (const bool early : {false, true}) {
              for (const int ahead : {0, 1}) {
                MoeRun merged(world, 2, small(layers, dense),
                              {.delay_weights = delay, .release_early = early, .gather_ahead = ahead});
                const auto got = merged.driver->run(batches(microbatches, 100 * rank));
                for (std::size_t m = 0; m < got.size(); ++m) EXPECT_TRUE(at::equal(got[m], losses[m])) << m;
                expect_equal_maps(merged.gradients(), expected, "merged");
              }
            }
          }
        }
      });
    }
  }
}

// The model in one graph, as autograd alone sees it.
class PlainCarry final : public pipeline::Carry {
 public:
  void put(const std::string& name, const at::Tensor& tensor) override { values_[name] = tensor; }
  [[nodiscard]] at::Tensor get(const std::string& name) const override { return values_.at(name); }

 private:
  std::map<std::string, at::Tensor> values_;
};

TEST(MoeSchedule, NodesEqualOneGraph) {
  for (const int ranks : {1, 2}) {
    on_ranks(ranks, [&](World world) {
      const auto data = batch(3 + static_cast<std::uint64_t>(world.rank().value()));
      MoeRun nodes(world, ranks, small(3, 1), {}), plain(world, ranks, small(3, 1), {});
      const auto losses = nodes.driver->run({data});
      for (const auto& unit : plain.context->units()) unit->unshard();
      PlainCarry carry;
      auto flow = plain.model->pre_function()(data.inputs, carry);
      for (int layer = 0; layer < 3; ++layer) {
        const auto f = plain.model->layer_functions(layer, 1.0);
        for (const auto* node : {&f.attend, &f.dispatch, &f.experts, &f.combine}) flow = (*node)(flow, carry);
      }
      flow = plain.model->post_function()(flow, carry);
      flow.push_back(data.targets[0]);
      const auto loss = plain.model->loss_function()(flow, carry)[0];
      EXPECT_TRUE(at::equal(loss.detach(), losses[0]));
      loss.backward();  // the driver's hooks reduce what is complete
      for (const auto& unit : plain.context->units()) unit->reshard();
      plain.context->finish_grad_sync();
      const auto got = nodes.gradients();
      for (const auto& [name, value] : plain.gradients()) {
        EXPECT_TRUE(at::allclose(got.at(name), value, 1e-6, 1e-8))
            << name << " differs by " << (got.at(name) - value).abs().max().item<double>();
        EXPECT_GT(value.abs().max().item<double>(), 0) << name;
      }
    });
  }
}

// C2: the sharded run equals one process that runs every rank's microbatches one after the other.
TEST(MoeSchedule, ShardedTrainingEqualsOneProcess) {
  for (const auto& [ranks, expert_ranks] : {std::pair(2, 2), std::pair(4, 2), std::pair(2, 1), std::pair(4, 4)}) {
    constexpr int kMicrobatches = 3, kSteps = 4;
    const auto config = small(2, 1);
    const SgdOptions sgd{.learning_rate = 0.1, .momentum = 0.9};
    std::map<std::string, at::Tensor> expected;
    std::vector<double> expected_losses;
    {
      UnitOptions unit;
      MoeRun one(World::single(), 1, config, {.schedule = Schedule::sequential, .delay_weights = false}, unit);
      Sgd optimizer(*one.context, sgd);
      for (int step = 0; step < kSteps; ++step) {
        std::vector<Microbatch> all;
        for (int m = 0; m < kMicrobatches; ++m) {
          for (int r = 0; r < ranks; ++r)
            all.push_back(batch(1000 * static_cast<std::uint64_t>(step) + 100 * static_cast<std::uint64_t>(r) +
                                static_cast<std::uint64_t>(m)));
        }
        double loss = 0;
        for (const auto& l : one.driver->run(all)) loss += l.item<double>() / static_cast<double>(all.size());
        expected_losses.push_back(loss);
        if (step % 2 == 0)  // the others show the scale of the gradients
          optimizer.step(clip_grad_norm_(*one.context, 0.5));
        else
          optimizer.step();
        optimizer.zero_grad();
      }
      expected = one.weights();
    }
    for (const auto& strategy : {zero3("edp"), zero1("edp")}) {
      on_ranks(ranks, [&, ranks = ranks, expert_ranks = expert_ranks](World world) {
        const auto rank = static_cast<std::uint64_t>(world.rank().value());
        UnitOptions unit;
        unit.placements = strategy;
        MoeRun run(world, expert_ranks, config, {}, unit);
        Sgd optimizer(*run.context, sgd);
        const auto sum = world.create_communicator(
            [&] {
              std::vector<int> all;
              for (int r = 0; r < ranks; ++r) all.push_back(r);
              return all;
            }(),
            "losses");
        for (int step = 0; step < kSteps; ++step) {
          const auto losses =
              run.driver->run(batches(kMicrobatches, 1000 * static_cast<std::uint64_t>(step) + 100 * rank));
          double loss = 0;
          for (const auto& l : losses) loss += l.item<double>() / (kMicrobatches * ranks);
          const Stream stream = world.runtime()->compute_stream();
          sum.all_reduce(&loss, &loss, Elements(1), at::kDouble, ReduceOp::sum, stream, "loss");
          stream.synchronize();
          EXPECT_NEAR(loss, expected_losses[static_cast<std::size_t>(step)], 1e-5) << step;
          if (step % 2 == 0)
            optimizer.step(clip_grad_norm_(*run.context, 0.5));
          else
            optimizer.step();
          optimizer.zero_grad();
        }
        const auto own = run.model->exchange()->own_experts(), first = run.model->exchange()->first_own_expert();
        for (auto& [name, value] : run.weights()) {
          at::Tensor whole = expected.at(name);
          if (whole.dim() == 3) whole = whole.narrow(0, first, own);
          EXPECT_TRUE(at::allclose(value, whole, 1e-6, 1e-6))
              << name << " differs by " << (value - whole).abs().max().item<double>();
        }
      });
    }
  }
}

// Twenty steps in bf16 with fp32 main gradients: zero3 under the merged schedule beside zero1 under the sequential one
// (a distributed optimizer), the tolerances of Megatron-LM's test, and narrower ones.
TEST(MoeSchedule, TwentyStepsEqualADistributedOptimizer) {
  on_ranks(2, [](World world) {
    const auto rank = static_cast<std::uint64_t>(world.rank().value());
    UnitOptions unit;
    unit.mixed_precision.param_dtype = at::kBFloat16;
    unit.mixed_precision.reduce_dtype = at::kFloat;
    unit.mixed_precision.main_param_dtype = at::kFloat;
    UnitOptions other = unit;
    other.placements = zero1("edp");
    MoeRun merged(world, 2, small(2), {}, unit),
        reference(world, 2, small(2), {.schedule = Schedule::sequential, .delay_weights = false}, other);
    AdamW a(*merged.context, {.learning_rate = 1e-3}), b(*reference.context, {.learning_rate = 1e-3});
    for (int step = 0; step < 20; ++step) {
      const auto data = 1000 * static_cast<std::uint64_t>(step) + 100 * rank;
      const auto x = merged.driver->run(batches(4, data)), y = reference.driver->run(batches(4, data));
      for (std::size_t m = 0; m < x.size(); ++m)
        EXPECT_NEAR(x[m].item<double>(), y[m].item<double>(), 1e-3 * y[m].item<double>());
      a.step();
      b.step();
      a.zero_grad();
      b.zero_grad();
      const auto expected = reference.weights();
      for (auto& [name, value] : merged.weights()) {
        EXPECT_TRUE(at::allclose(value, expected.at(name), 1e-3, 5e-3)) << name;  // Megatron-LM's
        EXPECT_LT((value - expected.at(name)).abs().max().item<double>(), 5e-4) << step << " " << name;
      }
    }
  });
}

// C3: collectives of a step.
TEST(MoeSchedule, CountsOfCollectives) {
  on_ranks(4, [](World world) {
    constexpr int kLayers = 3, kMicrobatches = 4;
    std::int64_t exchanges_of_sequential = 0, gathers_on_demand = 0;
    for (const auto schedule : {Schedule::sequential, Schedule::one_f_one_b}) {
      for (const int ahead : {0, 1}) {
        MoeRun run(world, 2, small(kLayers), {.schedule = schedule, .gather_ahead = ahead});
        run.driver->run(batches(kMicrobatches, 1));
        const auto before = run.context->counters();
        const auto exchanges_before = run.model->exchange()->exchanges();
        run.context->reset_peaks();
        run.driver->run(batches(kMicrobatches, 2));
        const auto after = run.context->counters();
        const auto reductions = after.reductions - before.reductions, gathers = after.unshards - before.unshards;
        const auto exchanges = run.model->exchange()->exchanges() - exchanges_before;
        EXPECT_EQ(reductions, (2 * kLayers + 1) * kMicrobatches);
        EXPECT_EQ(exchanges, 3 * 2 * kLayers * kMicrobatches);  // tokens, weights, results; forward and backward
        if (schedule == Schedule::sequential) exchanges_of_sequential = exchanges;
        EXPECT_EQ(exchanges, exchanges_of_sequential);
        for (const auto& unit : run.context->units()) EXPECT_FALSE(unit->gathered()) << unit->name();
        EXPECT_EQ(run.context->memory_report().reduce_slots, Bytes(0));  // the step was finished
        if (schedule != Schedule::one_f_one_b) continue;
        if (ahead == 0) {
          // Twice a microbatch for every layer and expert unit; once for the root.
          EXPECT_EQ(gathers, 2 * kMicrobatches * 2 * kLayers + kMicrobatches);
          gathers_on_demand = gathers;
        } else {
          EXPECT_LT(gathers, gathers_on_demand);
          EXPECT_LE(after.peak_gathered_units, 4);  // three, and the root
        }
      }
    }
  });
}

// C4.
TEST(MoeSchedule, IssuesTheGoldenOrder) {
  on_ranks(2, [](World world) {
    MoeRun run(world, 2, small(2), {});
    run.driver->run(batches(2, 3));
    std::string text;
    for (const auto& call : run.driver->issued()) text += pipeline::to_string(call) + " ";
    EXPECT_EQ(text,
              "pre.0f A0.0f D0.0f E0.0f C0.0f A1.0f D1.0f E1.0f C1.0f post.0f loss.0f "
              "loss.0b pre.1f post.0b C1.0b A0.1f E1.0b D0.1f E1.0w D1.0b E0.1f C0.1f A1.0b A1.0w "
              "C0.0b A1.1f E0.0b D1.1f E0.0w D0.0b E1.1f C1.1f A0.0b A0.0w post.1f pre.0b loss.1f "
              "loss.1b post.1b C1.1b E1.1b E1.1w D1.1b A1.1b A1.1w C0.1b E0.1b E0.1w D0.1b A0.1b A0.1w pre.1b ");
  });
}

// C5: all tokens go to the experts of one rank; the other receives none.
TEST(MoeSchedule, ARankWithoutTokensTakesPart) {
  on_ranks(2, [](World world) {
    auto config = small(2);
    config.auxiliary_loss = 0;
    MoeRun sequential(world, 2, config, {.schedule = Schedule::sequential}), merged(world, 2, config, {});
    for (auto* run : {&sequential, &merged}) {
      for (auto& block : run->model->blocks()) {
        block->expert_bias = at::zeros({4});
        block->expert_bias.narrow(0, 0, 2).fill_(100.0f);  // the experts of rank 0
      }
    }
    const auto rank = static_cast<std::uint64_t>(world.rank().value());
    const auto a = sequential.driver->run(batches(3, 10 * rank)), b = merged.driver->run(batches(3, 10 * rank));
    for (std::size_t m = 0; m < a.size(); ++m) EXPECT_TRUE(at::equal(a[m], b[m]));
    const auto gradients = merged.gradients();
    expect_equal_maps(gradients, sequential.gradients(), "merged");
    for (const auto& [name, value] : gradients) {
      if (name.find("experts") != std::string::npos) {
        EXPECT_EQ(value.abs().sum().item<double>() == 0, rank == 1) << name;
      }
    }
    EXPECT_EQ(merged.context->counters().reductions, 5 * 3);
    // The norm of the experts' gradients alone is that of both ranks.
    for (const auto& [name, leaf] : merged.context->named_parameters()) {
      if (name.find("experts") == std::string::npos && leaf.grad().defined()) leaf.grad().zero_();
    }
    EXPECT_GT(grad_norm(*merged.context).item<double>(), 0) << "on rank " << rank;
  });
}

// C7: hybrid accumulation: the gradients of every microbatch arrive.
TEST(MoeSchedule, EveryMicrobatchCountsUnderBothReducePolicies) {
  on_ranks(4, [](World world) {
    const auto rank = static_cast<std::uint64_t>(world.rank().value());
    std::map<std::string, at::Tensor> expected;
    for (const auto policy : {ReducePolicy::every_microbatch, ReducePolicy::last_microbatch}) {
      for (const auto& strategy : {zero3("edp"), zero1("edp"), zero2("edp")}) {
        UnitOptions unit;
        unit.placements = strategy;
        MoeRun run(world, 2, small(2), {}, unit, {.reduce = policy});
        run.driver->run(batches(2, 10 * rank));
        const auto got = run.gradients();
        if (expected.empty()) expected = got;
        for (const auto& [name, value] : got)
          EXPECT_TRUE(at::allclose(value, expected.at(name), 1e-5, 1e-7)) << strategy.name << " " << name;
      }
    }
  });
}

TEST(MoeSchedule, HybridShardingKeepsEveryMicrobatch) {
  on_ranks(4, [](World world) {
    const auto rank = static_cast<std::uint64_t>(world.rank().value());
    const DeviceMesh mesh(world, {{"copies", 2}, {"edp", 1}, {"ep", 2}});
    std::map<std::string, at::Tensor> expected;
    for (const char* name : {"zero3", "hsdp"}) {
      for (const auto policy : {ReducePolicy::every_microbatch, ReducePolicy::last_microbatch}) {
        UnitOptions unit;
        unit.placements.name = name;
        MoeRun run(mesh, small(2), {}, unit, {.reduce = policy});
        run.driver->run(batches(2, 10 * rank));
        const auto got = run.gradients();
        if (expected.empty()) expected = got;
        for (const auto& [parameter, value] : got)
          EXPECT_TRUE(at::allclose(value, expected.at(parameter), 1e-5, 1e-7)) << name << " " << parameter;
      }
    }
  });
}

TEST(MoeSchedule, EvaluationLeavesTrainingAlone) {
  on_ranks(2, [](World world) {
    MoeRun with(world, 2, small(2), {}), without(world, 2, small(2), {});
    const double first = with.driver->evaluate(batch(7)).item<double>();
    const double loss = with.driver->run({batch(7)})[0].item<double>();
    EXPECT_NEAR(first, loss, 1e-6);  // the auxiliary loss only adds gradients
    without.driver->run({batch(7)});
    expect_equal_maps(with.gradients(), without.gradients(), "after an evaluation");
    const auto logits = with.driver->predict({batch(7).inputs[0]})[0];
    EXPECT_EQ(logits.sizes(), at::IntArrayRef({2, 8, 40}));
    for (const auto& unit : with.context->units()) EXPECT_FALSE(unit->gathered());
  });
}

// Weights that change between an evaluation and a step are the new ones in that step.
TEST(MoeSchedule, StepsAfterAnEvaluationSeeTheOptimizersWeights) {
  for (const auto& strategy : {zero3("edp"), zero1("edp")}) {
    on_ranks(2, [&](World world) {
      UnitOptions unit;
      unit.placements = strategy;
      unit.mixed_precision.param_dtype = at::kBFloat16;
      unit.mixed_precision.main_param_dtype = at::kFloat;
      MoeRun plain(world, 2, small(2), {}, unit), looking(world, 2, small(2), {}, unit);
      Sgd a(*plain.context, {.learning_rate = 0.5}), b(*looking.context, {.learning_rate = 0.5});
      for (int step = 0; step < 3; ++step) {
        const auto seed = 10 * static_cast<std::uint64_t>(step);
        const auto x = plain.driver->run(batches(2, seed)), y = looking.driver->run(batches(2, seed));
        for (std::size_t m = 0; m < x.size(); ++m) EXPECT_TRUE(at::equal(x[m], y[m])) << step;
        static_cast<void>(looking.driver->evaluate(batch(seed)));  // before the optimizer's step
        for (const auto& u : looking.context->units()) auto scope = looking.context->unshard_scope(*u);
        a.step();
        b.step();
        a.zero_grad();
        b.zero_grad();
      }
    });
  }
}

TEST(MoeSchedule, FrozenPartsTakeNoPartAndTheRestIsAsBefore) {
  on_ranks(2, [](World world) {
    const auto frozen = [](const std::string& name) {
      return name.find("attention") != std::string::npos || name.find("blocks.0.") != std::string::npos;
    };
    std::map<std::string, at::Tensor> expected;
    for (const auto schedule : {Schedule::sequential, Schedule::one_f_one_b}) {
      for (const bool delay : {false, true}) {
        MoeRun run(world, 2, small(3), {.schedule = schedule, .delay_weights = delay});
        for (auto* group : run.context->groups()) {
          for (auto& p : group->parameters()) p.parameter.requires_grad_(!frozen(p.name));
        }
        run.driver->run(batches(3, 4));
        for (const auto& unit : run.context->units()) EXPECT_FALSE(unit->gathered()) << unit->name();
        const auto got = run.gradients();
        if (expected.empty()) expected = got;
        expect_equal_maps(got, expected, "frozen");
        for (const auto& [name, value] : got) {
          if (frozen(name)) {
            EXPECT_EQ(value.abs().max().item<double>(), 0) << name;
          }
        }
      }
    }
  });
}

TEST(MoeSchedule, AResetAfterAFailedStepLeavesACleanDriver) {
  on_ranks(2, [](World world) {
    MoeRun run(world, 2, small(2), {}), clean(world, 2, small(2), {});
    const bool fails = world.rank() == Rank(1);
    auto data = batches(3, 5);
    if (fails) data[1].targets[0] = data[1].targets[0].narrow(1, 0, 3);  // its loss throws; rank 0 waits for exchanges
    try {
      run.driver->run(std::move(data));
      if (fails) ADD_FAILURE() << "no error";
    } catch (const std::exception&) {
    }
    run.driver->reset();
    run.driver->run(batches(3, 6));
    clean.driver->run(batches(3, 6));
    expect_equal_maps(run.gradients(), clean.gradients(), "after a reset");
  });
}

// C7: weights are loaded in place; tensors that take a parameter's place are refused by name.
TEST(MoeSchedule, WeightsAreLoadedInPlaceAndNotReplaced) {
  on_ranks(2, [](World world) {
    MoeRun source(world, 2, small(2), {}), loaded(world, 2, small(2), {}, {}, {}, /*seed=*/6);
    const auto from = source.context->named_parameters();
    auto to = loaded.context->named_parameters();
    ASSERT_EQ(from.size(), to.size());
    {
      at::NoGradGuard no_grad;
      for (std::size_t i = 0; i < to.size(); ++i) to[i].second.copy_(from[i].second);
    }
    const auto a = source.driver->run(batches(2, 3)), b = loaded.driver->run(batches(2, 3));
    for (std::size_t m = 0; m < a.size(); ++m) EXPECT_TRUE(at::equal(a[m], b[m])) << m;
    expect_equal_maps(loaded.gradients(), source.gradients(), "loaded");

    auto& parameter = loaded.context->groups().front()->parameters().front();
    parameter.parameter.set_data(at::zeros(parameter.sizes));
    try {
      loaded.driver->run(batches(2, 3));
      ADD_FAILURE() << "no error";
    } catch (const UsageError& error) {
      EXPECT_NE(std::string(error.what()).find(parameter.name), std::string::npos) << error.what();
    }
  });
}

TEST(MoeSchedule, BiasesBalanceTheLoad) {
  on_ranks(2, [](World world) {
    auto config = small(1);
    config.auxiliary_loss = 0;
    config.bias_rate = 0.001;  // probabilities of a fresh model differ by about a hundredth
    MoeRun run(world, 2, config, {});
    auto& block = run.model->blocks()[0];
    const auto spread = [&] {
      block->load.zero_();
      run.driver->run(batches(4, 3));
      run.zero_grad();
      const at::Tensor load = block->load.to(at::kDouble);
      return (load.max() / load.mean()).item<double>();
    };
    const double before = spread();
    for (int i = 0; i < 20; ++i) {
      run.driver->run(batches(4, 3));
      run.zero_grad();
      run.model->update_expert_biases();
    }
    EXPECT_LT(spread(), before);
    EXPECT_EQ(block->expert_bias.abs().max().item<float>() > 0, true);
  });
}

TEST(MoeSchedule, UnitsWithHooksOfTheirOwnAreRefused) {
  on_ranks(1, [](World world) {
    auto context = FsdpContext::create(DeviceMesh(world, {{"edp", 1}, {"ep", 1}}));
    auto model = make_toy_model();
    shard_toy_model(*context, model, {.placements = zero3("edp")});
    auto staged = std::make_shared<models::MoeTransformer>(small(1), context->mesh());
    EXPECT_THROW(StepDriver(context, staged, {}), UsageError);
  });
}

}  // namespace
}  // namespace fsdp::testing
