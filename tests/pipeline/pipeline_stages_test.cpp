// Mixtures of experts over pipeline stages: interleaved 1F1B against one process that holds the whole model.
#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/randint.h>
#include <gtest/gtest.h>

#include <map>

#include "fsdp/fsdp.h"
#include "fsdp/pipeline/step_driver.h"
#include "models/moe_transformer.h"
#include "tests/support/ranks.h"

namespace fsdp::testing {
namespace {

using pipeline::Microbatch;
using pipeline::Schedule;
using pipeline::StageChannels;
using pipeline::StepDriver;
using pipeline::StepOptions;

models::MoeConfig small(int layers) {
  models::MoeConfig config;
  config.base = {
      .vocabulary = 40, .layers = layers, .width = 16, .heads = 2, .kv_heads = 1, .ffn_width = 24, .max_context = 32};
  config.experts = 4;
  config.expert_width = 12;
  config.shared_width = 20;
  config.dense_layers = 1;
  return config;
}

std::vector<Microbatch> batches(int count, int replica, int step) {
  std::vector<Microbatch> all;
  for (int m = 0; m < count; ++m) {
    auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(1000 * step + 100 * replica + m));
    const auto tokens = at::randint(40, {2, 9}, generator, at::TensorOptions().dtype(at::kLong));
    all.push_back({{tokens.narrow(1, 0, 8)}, {tokens.narrow(1, 1, 8).contiguous()}});
  }
  return all;
}

struct StagedRun {
  StagedRun(const World& world, int stages, int expert_ranks, int chunks, int layers, const StepOptions& options,
            UnitOptions unit = {})
      : mesh(world, {{"pp", stages}, {"edp", world.size() / stages / expert_ranks}, {"ep", expert_ranks}}),
        parts(models::MoeTransformer::parts(small(layers), mesh, chunks)),
        context(FsdpContext::create(mesh)) {
    for (auto& part : parts) part->shard(*context, unit);
    context->materialize(parts[0]->initializer(), {.seed = 5});
    driver = std::make_unique<StepDriver>(
        context, std::vector<std::shared_ptr<pipeline::StagedModel>>(parts.begin(), parts.end()),
        StageChannels::create(mesh, "pp"), options);
  }
  [[nodiscard]] int stage() const { return mesh.coordinate(0); }
  [[nodiscard]] bool last() const { return stage() + 1 == mesh.axis(0).size; }
  // Which of the model's copies of the data this rank works on.
  [[nodiscard]] int replica() const { return mesh.coordinate(1) * mesh.axis(2).size + mesh.coordinate(2); }
  std::map<std::string, at::Tensor> gradients() {
    std::map<std::string, at::Tensor> all;
    for (auto& [name, leaf] : context->named_parameters()) all[name] = context->full_gradient(name);
    return all;
  }
  DeviceMesh mesh;
  std::vector<std::shared_ptr<models::MoeTransformer>> parts;
  std::shared_ptr<FsdpContext> context;
  std::unique_ptr<StepDriver> driver;
};

constexpr int kSteps = 3;
const SgdOptions kSgd{.learning_rate = 0.1, .momentum = 0.9};

struct Expected {
  std::map<std::string, at::Tensor> weights;
  std::vector<double> losses, norms;  // [step]
};

// One process that runs the microbatches of all copies one after the other.
Expected one_process(int layers, int microbatches, int replicas) {
  const World world = World::single();
  const DeviceMesh mesh(world, {{"edp", 1}, {"ep", 1}});
  const auto model = std::make_shared<models::MoeTransformer>(small(layers), mesh);
  auto context = FsdpContext::create(mesh);
  model->shard(*context, {});
  context->materialize(model->initializer(), {.seed = 5});
  StepDriver driver(context, model, {.schedule = Schedule::sequential, .delay_weights = false});
  Sgd optimizer(*context, kSgd);
  Expected expected;
  for (int step = 0; step < kSteps; ++step) {
    std::vector<Microbatch> all;
    for (int r = 0; r < replicas; ++r) {
      auto some = batches(microbatches, r, step);
      std::move(some.begin(), some.end(), std::back_inserter(all));
    }
    double loss = 0;
    for (const auto& l : driver.run(all)) loss += l.item<double>() / static_cast<double>(all.size());
    expected.losses.push_back(loss);
    const auto norm = clip_grad_norm_(*context, 0.5);
    expected.norms.push_back(norm.item<double>());
    optimizer.step(norm);
    optimizer.zero_grad();
  }
  for (auto& [name, leaf] : context->named_parameters()) expected.weights[name] = context->full_parameter(name);
  return expected;
}

void on_ranks(int ranks, const std::function<void(World)>& body) {
  run_on_ranks(ranks, [&](World world, SideChannel&) { body(std::move(world)); });
}

struct Case {
  int ranks, stages, expert_ranks, chunks, layers, microbatches;
};

TEST(PipelineStages, TrainingEqualsOneProcess) {
  for (const Case& c :
       {Case{1, 1, 1, 1, 3, 3}, Case{2, 2, 1, 1, 3, 3}, Case{2, 2, 1, 2, 4, 4}, Case{2, 2, 1, 3, 7, 2},
        Case{4, 2, 2, 2, 4, 4}, Case{4, 2, 1, 2, 5, 2}, Case{4, 4, 1, 1, 4, 5}, Case{4, 4, 1, 2, 8, 4}}) {
    const int replicas = c.ranks / c.stages;
    const Expected expected = one_process(c.layers, c.microbatches, replicas);
    for (const auto schedule : {Schedule::one_f_one_b, Schedule::sequential}) {
      on_ranks(c.ranks, [&](World world) {
        StagedRun run(world, c.stages, c.expert_ranks, c.chunks, c.layers, {.schedule = schedule});
        Sgd optimizer(*run.context, kSgd);
        for (int step = 0; step < kSteps; ++step) {
          const auto losses = run.driver->run(batches(c.microbatches, run.replica(), step));
          double loss = 0;
          for (const auto& l : losses) {
            ASSERT_EQ(l.defined(), run.last());
            if (l.defined()) loss += l.item<double>() / static_cast<double>(losses.size() * replicas);
          }
          const Stream stream = world.runtime()->compute_stream();
          for (int axis = 0; axis < 3; ++axis)
            run.mesh.communicator(axis, Use::reduce)
                .all_reduce(&loss, &loss, Elements(1), at::kDouble, ReduceOp::sum, stream, "loss");
          stream.synchronize();
          EXPECT_NEAR(loss, expected.losses[static_cast<std::size_t>(step)], 1e-5) << step;
          const auto norm = clip_grad_norm_(*run.context, 0.5);
          EXPECT_NEAR(norm.item<double>(), expected.norms[static_cast<std::size_t>(step)], 1e-5) << step;
          optimizer.step(norm);
          optimizer.zero_grad();
        }
        int units = 0;
        for (const auto& unit : run.context->units()) units += unit->groups().empty() ? 0 : 1;
        EXPECT_EQ(run.context->counters().reductions, kSteps * c.microbatches * units);
        for (const auto& unit : run.context->units()) EXPECT_FALSE(unit->gathered()) << unit->name();
        const auto& exchange = *run.parts[0]->exchange();
        for (auto& [name, leaf] : run.context->named_parameters()) {
          const at::Tensor value = run.context->full_parameter(name);
          at::Tensor whole = expected.weights.at(name);
          if (whole.dim() == 3) whole = whole.narrow(0, exchange.first_own_expert(), exchange.own_experts());
          EXPECT_TRUE(at::allclose(value, whole, 1e-6, 1e-6))
              << c.ranks << " ranks, " << c.stages << " stages, " << c.chunks << " chunks: " << name << " differs by "
              << (value - whole).abs().max().item<double>();
        }
      });
    }
  }
}

TEST(PipelineStages, MergedEqualsUnmergedBitForBit) {
  on_ranks(4, [](World world) {
    std::map<std::string, at::Tensor> expected;
    for (const auto schedule : {Schedule::sequential, Schedule::one_f_one_b}) {
      for (const bool delay : {false, true}) {
        for (const int ahead : {0, 1}) {
          StagedRun run(world, 2, 2, 2, 4, {.schedule = schedule, .delay_weights = delay, .gather_ahead = ahead});
          run.driver->run(batches(4, run.replica(), 0));
          const auto got = run.gradients();
          if (expected.empty()) expected = got;
          ASSERT_EQ(got.size(), expected.size());
          for (const auto& [name, value] : got) EXPECT_TRUE(at::equal(value, expected.at(name))) << name;
        }
      }
    }
  });
}

TEST(PipelineStages, EvaluationGivesTheLossOfTheWholeModel) {
  double expected = 0;
  {
    const DeviceMesh mesh(World::single(), {{"edp", 1}, {"ep", 1}});
    const auto model = std::make_shared<models::MoeTransformer>(small(4), mesh);
    auto context = FsdpContext::create(mesh);
    model->shard(*context, {});
    context->materialize(model->initializer(), {.seed = 5});
    expected = StepDriver(context, model, {}).evaluate(batches(1, 0, 0)[0]).item<double>();
  }
  on_ranks(2, [&](World world) {
    StagedRun run(world, 2, 1, 2, 4, {});
    for (int i = 0; i < 2; ++i) {
      const auto loss = run.driver->evaluate(batches(1, 0, 0)[0]);
      ASSERT_EQ(loss.defined(), run.last());
      if (loss.defined()) {
        EXPECT_NEAR(loss.item<double>(), expected, 1e-6);
      }
      const auto logits = run.driver->predict(batches(1, 0, 0)[0].inputs);
      ASSERT_EQ(logits.size(), run.last() ? 1u : 0u);
      run.driver->run(batches(2, 0, 1));  // training between them goes its way
      for (auto* group : run.context->groups()) group->zero_gradients(true);
    }
  });
}

TEST(PipelineStages, AResetAfterAFailedStepLeavesACleanDriver) {
  on_ranks(2, [](World world) {
    StagedRun run(world, 2, 1, 2, 4, {}), clean(world, 2, 1, 2, 4, {});
    auto data = batches(4, 0, 0);
    data[1].targets[0] = data[1].targets[0].narrow(1, 0, 3);  // its loss throws, on the last stage
    try {
      run.driver->run(std::move(data));
      ADD_FAILURE() << "no error";
    } catch (const std::exception&) {
    }
    run.driver->reset();
    run.driver->run(batches(4, 0, 1));
    clean.driver->run(batches(4, 0, 1));
    const auto expected = clean.gradients();
    for (const auto& [name, value] : run.gradients()) EXPECT_TRUE(at::equal(value, expected.at(name))) << name;
  });
}

// Messages between stages carry no names, so stages that do different things would train on the wrong data.
TEST(PipelineStages, StagesThatMakeDifferentCallsAreTold) {
  const auto on_stages = [](const std::function<void(StagedRun&)>& body) {
    on_ranks(2, [&](World world) {
      StagedRun run(world, 2, 1, 1, 2, {});
      try {
        body(run);
        ADD_FAILURE() << "no error on stage " << run.stage();
      } catch (const UsageError& error) {
        EXPECT_NE(std::string(error.what()).find("All stages"), std::string::npos) << error.what();
      }
    });
  };
  on_stages([](StagedRun& run) { run.driver->run(batches(run.last() ? 3 : 4, 0, 0)); });
  on_stages([](StagedRun& run) {
    if (run.last())
      run.driver->run(batches(2, 0, 0));
    else
      static_cast<void>(run.driver->evaluate(batches(1, 0, 0)[0]));
  });
  on_stages([](StagedRun& run) {  // as many tokens, but other sequences
    auto data = batches(2, 0, 0);
    if (run.last()) data[1].inputs[0] = data[1].inputs[0].reshape({4, 4});
    run.driver->run(std::move(data));
  });
}

TEST(PipelineStages, WhatIsMissingIsNamed) {
  on_ranks(1, [](World world) {
    const DeviceMesh mesh(world, {{"edp", 1}, {"ep", 1}});
    auto model = std::make_shared<models::MoeTransformer>(small(2), mesh);
    auto context = FsdpContext::create(mesh);
    EXPECT_THROW(static_cast<void>(model->units(pipeline::NodeKind::pre, -1)), UsageError);  // not sharded
    model->shard(*context, {});
    context->materialize(model->initializer());
    auto driver = std::make_unique<StepDriver>(context, model, StepOptions{});
    EXPECT_THROW(StepDriver(context, model, {}), UsageError);  // a second one
    auto data = batches(1, 0, 0);
    data[0].targets.clear();
    EXPECT_THROW(driver->run(data), UsageError);
    driver->reset();
    data[0].inputs.clear();
    EXPECT_THROW(driver->run(data), UsageError);
    driver.reset();
    StepDriver again(context, model, {});
    again.reset();
    again.run(batches(1, 0, 0));
    auto none = small(2);
    none.experts = none.dense_layers = 0;
    EXPECT_THROW(models::MoeTransformer(none, mesh), UsageError);
  });
  on_ranks(2, [](World world) {
    const DeviceMesh mesh(world, {{"pp", 2}, {"edp", 1}, {"ep", 1}});
    EXPECT_THROW(models::MoeTransformer(small(2), mesh), UsageError);  // the whole model on every stage
  });
}

TEST(PipelineStages, WhatDoesNotFitIsRefused) {
  on_ranks(2, [](World world) {
    StagedRun run(world, 2, 1, 2, 4, {});
    EXPECT_THROW(run.driver->run(batches(3, 0, 0)), UsageError);  // no multiple of the stages
    EXPECT_THROW(static_cast<void>(models::MoeTransformer::parts(small(3), run.mesh, 2)), UsageError);
    // Parts in the wrong order, and parts without a way between them.
    std::vector<std::shared_ptr<pipeline::StagedModel>> swapped(run.parts.rbegin(), run.parts.rend());
    EXPECT_THROW(StepDriver(run.context, swapped, StageChannels::create(run.mesh, "pp"), {}), UsageError);
    EXPECT_THROW(StepDriver(run.context, swapped, nullptr, {}), UsageError);
    // Stages with different numbers of parts.
    std::vector<std::shared_ptr<pipeline::StagedModel>> some(run.parts.begin(), run.parts.end());
    if (world.rank() == Rank(1)) some.pop_back();
    EXPECT_THROW(StepDriver(run.context, some, StageChannels::create(run.mesh, "pp"), {}), UsageError);
  });
}

}  // namespace
}  // namespace fsdp::testing
