// One rank on a GPU, and rank 0 of several that only look as if they were there.
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/linear.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <optional>

#include "fsdp/runtime/device_profile.h"
#include "tests/gpu/gpu.h"

namespace fsdp::testing {
namespace {

const WorldOptions kCuda{.device = DeviceKind::cuda};

std::vector<at::Tensor> train(World world, const ContextOptions& options, const UnitOptions& unit, int steps = 3,
                              int microbatches = 1) {
  GpuRun run(world, options, unit);
  Sgd optimizer(*run.context, {.learning_rate = 0.1, .momentum = 0.9});
  for (int step = 0; step < steps; ++step) {
    for (int micro = 0; micro < microbatches; ++micro) {
      auto scope = run.context->microbatch({.is_last = micro + 1 == microbatches});
      run.loss(static_cast<std::uint64_t>(step * microbatches + micro)).backward();
    }
    optimizer.step(clip_grad_norm_(*run.context, 1.0));
    optimizer.zero_grad();
  }
  return run.weights();
}

TEST(GpuTraining, EqualsTheCpu) {
  for (const bool low : {false, true}) {
    UnitOptions unit;
    if (low) {
      unit.mixed_precision.param_dtype = at::kBFloat16;
      unit.mixed_precision.reduce_dtype = at::kFloat;
    }
    const auto there = train(World::single(kCuda), {}, unit);
    const auto here = train(World::single(), {}, unit);
    ASSERT_EQ(there.size(), here.size());
    for (std::size_t i = 0; i < here.size(); ++i)
      EXPECT_TRUE(at::allclose(there[i], here[i], low ? 2e-2 : 1e-4, low ? 2e-3 : 1e-5))
          << "tensor " << i << " differs by " << (there[i] - here[i]).abs().max().item<double>();
  }
}

TEST(GpuTraining, PoliciesAndStrategiesChangeNoBit) {
  for (const auto reduce_dtype : {at::kFloat, at::kBFloat16}) {
    std::vector<at::Tensor> expected;
    for (const auto& strategy : {zero3("dp"), zero2("dp"), zero1("dp"), ddp({"dp"})}) {
      for (const auto& prefetch : {Prefetch::depth(1), Prefetch::none(), Prefetch::depth(2),
                                   Prefetch::delayed_release(2), Prefetch::recorded()}) {
        for (const bool unified : {false, true}) {
          for (const int delay : {0, 1}) {
            UnitOptions unit;
            unit.placements = strategy;
            unit.mixed_precision.param_dtype = at::kBFloat16;
            unit.mixed_precision.reduce_dtype = reduce_dtype;
            ContextOptions options;
            options.prefetch = prefetch;
            options.unify_communication_stream = unified;
            options.reduction = {delay};
            const auto got = train(World::single(kCuda), options, unit, 3, 2);
            if (expected.empty()) expected = got;
            expect_equal(got, expected, strategy.name);
          }
        }
      }
    }
  }
}

TEST(GpuTraining, AdamWEqualsTorch) {
  UnitOptions unit;
  GpuRun own(World::single(kCuda), {}, unit), theirs(World::single(kCuda), {}, unit);
  AdamW optimizer(*own.context, {.learning_rate = 1e-2, .weight_decay = 0.1});
  torch::optim::AdamW reference(theirs.context->parameters(), torch::optim::AdamWOptions(1e-2).weight_decay(0.1));
  for (int step = 0; step < 5; ++step) {
    own.loss(static_cast<std::uint64_t>(step)).backward();
    optimizer.step();
    optimizer.zero_grad();
    theirs.loss(static_cast<std::uint64_t>(step)).backward();
    reference.step();
    reference.zero_grad();
  }
  const auto a = own.weights(), b = theirs.weights();
  for (std::size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::allclose(a[i], b[i], 1e-4, 1e-5)) << i;
}

// The optimizer writes the bf16 weights itself; writing leaves by hand must still be seen.
TEST(GpuTraining, LowPrecisionWeightsFollowEveryWrite) {
  UnitOptions unit;
  unit.mixed_precision.param_dtype = at::kBFloat16;
  GpuRun run(World::single(kCuda), {}, unit);
  AdamW optimizer(*run.context, {.learning_rate = 1e-2});
  const auto expect_current = [&](const char* when) {
    run.loss(1).backward();
    for (auto& u : run.context->units()) {
      if (u->groups().empty()) continue;
      const auto scope = run.context->unshard_scope(*u);
      for (const auto& group : u->groups()) {
        for (const auto& p : group->parameters())
          EXPECT_TRUE(at::equal(p.parameter.flatten(), p.leaf.detach().to(at::kBFloat16))) << when << " " << p.name;
      }
    }
  };
  expect_current("at first");
  optimizer.step();
  optimizer.zero_grad();
  expect_current("after a step");
  {
    at::NoGradGuard no_grad;
    for (auto& leaf : run.context->parameters()) leaf.mul_(1.5);
  }
  optimizer.step();
  optimizer.zero_grad();
  expect_current("after a write by hand and a step");
}

TEST(GpuTraining, UnusedParametersKeepNoGradient) {
  for (const bool own : {true, false}) {
    GpuRun run(World::single(kCuda));
    std::unique_ptr<ShardedOptimizer> optimizer;
    if (own)
      optimizer = std::make_unique<AdamW>(*run.context, AdamWOptions{.learning_rate = 1e-2, .weight_decay = 0.5});
    else
      optimizer = std::make_unique<Sgd>(*run.context, SgdOptions{.learning_rate = 1e-2, .weight_decay = 0.5});
    run.loss(1).backward();
    optimizer->step();
    optimizer->zero_grad();
    EXPECT_EQ(run.context->counters().waits_for_device, 0) << "the host waited although every parameter was used";
    run.model->skipped = 1;
    const auto before = run.weights();
    run.loss(2).backward();
    int undefined = 0;
    for (const auto& [name, leaf] : run.context->named_parameters()) {
      EXPECT_EQ(leaf.grad().defined(), name.find("layers.1.") == std::string::npos) << name;
      undefined += leaf.grad().defined() ? 0 : 1;
    }
    EXPECT_EQ(undefined, 3);
    optimizer->step();
    const auto after = run.weights();
    std::size_t i = 0;
    for (const auto& [name, leaf] : run.context->named_parameters()) {
      EXPECT_EQ(at::equal(before[i], after[i]), name.find("layers.1.") != std::string::npos) << name;
      ++i;
    }
  }
}

TEST(GpuTraining, LoopbackRunsInBothModes) {
  for (const auto mode : {LoopbackOptions::Mode::copy, LoopbackOptions::Mode::link}) {
    for (const int held : {0, 4}) {
      std::vector<at::Tensor> expected;
      for (const auto& prefetch : {Prefetch::none(), Prefetch::depth(1), Prefetch::depth(2)}) {
        UnitOptions unit;
        unit.mixed_precision.param_dtype = at::kBFloat16;
        ContextOptions options;
        options.prefetch = prefetch;
        const World world = World::loopback({.size = 4, .mode = mode, .gather_multiprocessors = held});
        const auto got = train(world, options, unit);
        if (mode == LoopbackOptions::Mode::link) continue;  // it moves no data in steady state
        if (expected.empty()) expected = got;
        expect_equal(got, expected, "loopback");
      }
    }
  }
}

// Also while reductions are held up, so that whoever does not wait reads old gradients.
TEST(GpuTraining, OptimizersThatOverlapReductionsGiveTheSameBits) {
  const World world = World::loopback({.size = 4});
  for (const double clip : {0.0, 0.5}) {
    std::vector<at::Tensor> expected;
    for (const bool overlap : {false, true}) {
      for (const std::int64_t held : {0, 1'500'000}) {
        UnitOptions unit;
        unit.mixed_precision.param_dtype = at::kBFloat16;
        GpuRun run(world, slow_mesh(world, 0, held), {.overlap_optimizer = overlap}, unit, 4, 256);
        run.prepare_inputs(4);
        AdamW optimizer(*run.context, {.learning_rate = 1e-2});
        for (int step = 0; step < 4; ++step) {
          run.loss(static_cast<std::uint64_t>(step)).backward();
          if (clip > 0)
            optimizer.step(clip_grad_norm_(*run.context, clip));
          else
            optimizer.step();
          optimizer.zero_grad();
        }
        const auto got = run.weights();
        if (expected.empty()) expected = got;
        expect_equal(got, expected, overlap ? "overlapping" : "joined");
      }
    }
  }
}

TEST(GpuTraining, DelayedWeightGradientsEqualOrdinaryOnes) {
  UnitOptions unit;
  unit.mixed_precision.param_dtype = at::kBFloat16;
  unit.mixed_precision.reduce_dtype = at::kFloat;
  unit.register_hooks = false;
  std::vector<at::Tensor> expected;
  for (const bool delay : {false, true}) {
    GpuRun run(World::loopback({.size = 4}), {.reduce = ReducePolicy::last_microbatch}, unit, 3, 128);
    int completed = 0;
    for (const auto& u : run.context->units()) {
      u->register_post_backward_hook([&](FsdpModule& complete) {
        complete.reshard();
        complete.reduce_gradients();
        ++completed;
      });
    }
    for (int micro = 0; micro < 2; ++micro) {
      auto scope = run.context->microbatch({.is_last = micro == 1});
      for (const auto& u : run.context->units()) u->unshard();
      DelayedWeightGradients later;
      std::optional<DelayedWeightGradients::Scope> recording;
      if (delay) recording.emplace(later);
      const auto x = random({8, 128}, static_cast<std::uint64_t>(micro)).to(kGpu).to(at::kBFloat16);
      const auto loss = run.model->loss(x);
      recording.reset();
      loss.backward();
      EXPECT_EQ(completed, delay ? 3 * micro : 3 * (micro + 1));
      EXPECT_EQ(later.pending(), delay ? 3u : 0u);
      later.run();
      EXPECT_EQ(completed, 3 * (micro + 1));
    }
    run.context->finish_grad_sync();
    std::vector<at::Tensor> gradients;
    for (auto& [name, leaf] : run.context->named_parameters())
      gradients.push_back(run.context->full_gradient(name).to(at::kCPU));
    if (expected.empty()) expected = gradients;
    expect_equal(gradients, expected, "delayed");
  }
}

TEST(GpuTraining, ProfileSeesCollectivesUnderTheirNames) {
  GpuRun run(World::loopback({.size = 4}), {}, {}, 4, 512);
  for (int i = 0; i < 3; ++i) run.loss(1).backward();
  trace::Recorder names;
  const auto spans = profile_device(
      [&] {
        run.loss(1).backward();
        run.world.runtime()->compute_stream().synchronize();
      },
      names);
  int gathers = 0, reductions = 0, compute = 0;
  for (const auto& span : spans) {
    gathers += span.kind == trace::Kind::all_gather ? 1 : 0;
    reductions += span.kind == trace::Kind::reduce_scatter ? 1 : 0;
    compute += span.kind == trace::Kind::compute && span.stream == 0 ? 1 : 0;
    if (span.kind == trace::Kind::all_gather) {
      EXPECT_TRUE(std::string(span.name).starts_with("FSDP:layers."));
    }
  }
  EXPECT_EQ(gathers, 7);  // four forward, three backward: the last unit stays
  EXPECT_EQ(reductions, 4);
  EXPECT_GT(compute, 20);
}

// What the caller computes on is any stream.
TEST(GpuTraining, RunsOnTheCallersStream) {
  const auto expected = train(World::single(kCuda), {}, {});
  const World world = World::single(kCuda);
  const Stream side = world.runtime()->make_stream("caller");
  std::vector<at::Tensor> got;
  side.enqueue([&] { got = train(world, {}, {}); });
  expect_equal(got, expected, "on a side stream");
  // A context made on one stream, used on another.
  std::optional<GpuRun> run;
  run.emplace(world);
  run->loss(1).backward();
  world.runtime()->compute_stream().synchronize();
  side.enqueue([&] {
    for (auto& leaf : run->context->parameters()) leaf.mutable_grad().reset();
    run->loss(1).backward();
    side.synchronize();
  });
  GpuRun other(World::single(kCuda));
  other.loss(1).backward();
  for (std::size_t i = 0; i < run->context->parameters().size(); ++i)
    EXPECT_TRUE(at::equal(run->context->parameters()[i].grad().cpu(), other.context->parameters()[i].grad().cpu()))
        << i;
}

// Spins on every stream in turn change no bit: nothing is read before it is written, or written while it is read.
TEST(GpuRace, SpinsChangeNoBit) {
  constexpr std::int64_t kSpin = 1'500'000;  // ns
  struct Place {
    const char* name;
    std::int64_t gather = 0, reduce = 0;
    int compute = -1;
    bool side_stream = false;
  };
  const auto run_with = [&](const Place& place, const ContextOptions& options, const Strategy& strategy) {
    const World world = World::loopback({.size = 4});
    UnitOptions unit;
    unit.placements = strategy;
    unit.mixed_precision.param_dtype = at::kBFloat16;
    unit.mixed_precision.reduce_dtype = at::kFloat;
    std::vector<at::Tensor> weights;
    const auto body = [&] {
      GpuRun run(world, slow_mesh(world, place.gather, place.reduce), options, unit, 6, 256);
      run.prepare_inputs(6);
      AdamW optimizer(*run.context, {.learning_rate = 1e-2});
      const auto spin = [&](int at) {
        if (at == place.compute) world.runtime()->kernels()->spin(kSpin, 1);
      };
      for (int step = 0; step < 3; ++step) {
        for (int micro = 0; micro < 2; ++micro) {
          auto scope = run.context->microbatch({.is_last = micro == 1});
          spin(0);
          const auto loss = run.loss(static_cast<std::uint64_t>(2 * step + micro));
          spin(1);
          loss.backward();
        }
        spin(2);
        optimizer.step(clip_grad_norm_(*run.context, 1.0));
        spin(3);
        optimizer.zero_grad();
      }
      weights = run.weights();
    };
    if (!place.side_stream) {
      body();
    } else {
      world.runtime()->make_stream("caller").enqueue([&] { body(); });
    }
    return weights;
  };
  for (const auto& strategy : {zero3("dp"), zero2("dp"), zero1("dp")}) {
    for (const auto policy : {ReducePolicy::every_microbatch, ReducePolicy::last_microbatch}) {
      ContextOptions options;
      options.reduce = policy;
      const auto expected = run_with({"nowhere"}, options, strategy);
      for (const Place& place :
           {Place{"gathers", kSpin}, Place{"reductions", 0, kSpin}, Place{"both", kSpin, kSpin},
            Place{"before forward", 0, 0, 0}, Place{"before backward", 0, 0, 1}, Place{"before the optimizer", 0, 0, 2},
            Place{"after the optimizer", 0, 0, 3}, Place{"nowhere, on a side stream", 0, 0, -1, true},
            Place{"gathers, on a side stream", kSpin, 0, 2, true}})
        expect_equal(run_with(place, options, strategy), expected, strategy.name + ", spins in " + place.name);
    }
  }
}

// --- Captured steps ---

struct CapturedRun {
  explicit CapturedRun(World world, UnitOptions unit = {})
      : run(world, {}, unit, 4, 128), optimizer(*run.context, {.learning_rate = 1e-2}) {
    input = random_on_gpu({8, 128}, 1);
  }
  at::Tensor step() {
    at::Tensor total;
    for (int micro = 0; micro < 2; ++micro) {
      auto scope = run.context->microbatch({.is_last = micro == 1});
      auto loss = fsdp::call(run.model, &GpuStackImpl::loss, input * (1.0 + micro));
      loss.backward();
      total = total.defined() ? total + loss.detach() : loss.detach();
    }
    optimizer.step(clip_grad_norm_(*run.context, 1.0));
    optimizer.zero_grad();
    return total;
  }
  void feed(int step) { input.copy_(random_on_gpu({8, 128}, 100 + static_cast<std::uint64_t>(step))); }
  GpuRun run;
  AdamW optimizer;
  at::Tensor input;
};

TEST(GpuCapture, ReplayEqualsEagerBitForBit) {
  for (const auto& strategy : {zero3("dp"), zero1("dp")}) {
    for (const int ranks : {1, 4}) {
      UnitOptions unit;
      unit.placements = strategy;
      unit.mixed_precision.param_dtype = at::kBFloat16;
      unit.mixed_precision.reduce_dtype = at::kFloat;
      const auto world = [&] { return ranks == 1 ? World::single(kCuda) : World::loopback({.size = ranks}); };
      CapturedRun eager(world(), unit), captured(world(), unit);
      std::vector<double> eager_losses, captured_losses;
      std::optional<FsdpContext::CapturedStep> graph;
      for (int step = 0; step < 8; ++step) {
        const double rate = 1e-2 / (1 + step);
        eager.feed(step);
        captured.feed(step);
        eager.optimizer.set_learning_rate(rate);
        captured.optimizer.set_learning_rate(rate);
        if (step == 3) graph.emplace(captured.run.context->capture([&] { return captured.step(); }));
        eager_losses.push_back(eager.step().item<double>());
        const bool replayed = graph && step != 6;  // once in between as usual
        captured_losses.push_back((replayed ? graph->replay() : captured.step()).item<double>());
      }
      EXPECT_EQ(eager_losses, captured_losses);
      expect_equal(captured.run.weights(), eager.run.weights(), strategy.name);
      EXPECT_NE(eager_losses.front(), eager_losses.back());
    }
  }
}

TEST(GpuCapture, RefusesWithTheReasonAndGoesOn) {
  CapturedRun run(World::single(kCuda)), plain(World::single(kCuda));
  for (int step = 0; step < 2; ++step) {
    run.step();
    plain.step();
  }
  try {
    static_cast<void>(run.run.context->capture([&] {
      const auto loss = run.step();
      static_cast<void>(loss.item<double>());
      return loss;
    }));
    FAIL() << "captured a wait for the device";
  } catch (const UsageError& error) {
    EXPECT_NE(std::string(error.what()).find("the step cannot be captured"), std::string::npos) << error.what();
  }
  static_cast<void>(random_on_gpu({4}, 1).bernoulli(0.5));  // random numbers still work
  for (int step = 0; step < 2; ++step) {
    run.step();
    plain.step();
  }
  auto captured = run.run.context->capture([&] { return run.step(); });
  captured.replay();
  plain.step();
  expect_equal(run.run.weights(), plain.run.weights(), "after a failed capture");
}

// --- The output head ---

TEST(GpuCrossEntropy, EqualsATenInChunks) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    for (const std::int64_t vocabulary : {1000, 4099}) {
      for (const auto reduction : {at::Reduction::Mean, at::Reduction::Sum}) {
        struct HeadImpl : torch::nn::Module {
          HeadImpl(std::int64_t vocabulary, std::int64_t width) {
            weight = register_parameter("weight", random({vocabulary, width}, 3) * 0.2);
          }
          at::Tensor forward(at::Tensor x, at::Tensor targets, at::Reduction::Reduction reduction, bool own) {
            if (own) return linear_cross_entropy(x, weight, targets, {.reduction = reduction, .chunk_rows = 48});
            return at::cross_entropy_loss(at::linear(x, weight).reshape({-1, weight.size(0)}).to(at::kFloat),
                                          targets.reshape({-1}), {}, reduction);
          }
          at::Tensor weight;
        };
        std::vector<at::Tensor> losses, dx, dw;
        for (const bool own : {false, true}) {
          auto context = FsdpContext::create(DeviceMesh(World::single(kCuda), {{"dp", 1}}));
          torch::nn::ModuleHolder<fsdp::Hooked<HeadImpl>> head(vocabulary, std::int64_t{64});
          UnitOptions unit;
          unit.mixed_precision.param_dtype = dtype;
          unit.mixed_precision.reduce_dtype = at::kFloat;
          context->fully_shard(head, unit);
          at::Tensor x = random_on_gpu({4, 37, 64}, 5).to(dtype).set_requires_grad(true);
          at::Tensor targets = (at::arange(4 * 37, at::kLong) * 7919 % vocabulary).view({4, 37}).to(kGpu);
          targets[1][3] = -100;
          const auto loss = head->forward(x, targets, reduction, own);
          loss.backward();
          losses.push_back(loss.detach().cpu());
          dx.push_back(x.grad().to(at::kFloat).cpu());
          dw.push_back(context->full_gradient("weight").cpu());
        }
        const double tolerance = dtype == at::kFloat ? 1e-5 : 2e-2;
        const auto close = [&](const at::Tensor& a, const at::Tensor& b) {
          return (a - b).abs().max().item<double>() <= tolerance * (b.abs().max().item<double>() + 1e-6);
        };
        EXPECT_TRUE(close(losses[1], losses[0])) << losses[1].item<double>() << " " << losses[0].item<double>();
        EXPECT_TRUE(close(dx[1], dx[0])) << (dx[1] - dx[0]).abs().max().item<double>();
        EXPECT_TRUE(close(dw[1], dw[0])) << (dw[1] - dw[0]).abs().max().item<double>();
      }
    }
  }
}

// --- Memory ---

TEST(GpuMemory, TransientBytesDoNotGrowWithTheLayers) {
  std::vector<std::int64_t> gathered, slots, units;
  for (const int depth : {4, 8, 16}) {
    GpuRun run(World::loopback({.size = 4}), {}, {}, depth, 256);
    for (int i = 0; i < 3; ++i) run.loss(1).backward();
    const auto report = run.context->memory_report();
    const auto unit = run.context->units().front()->groups().front()->whole_bytes().value();
    gathered.push_back(report.gathered_peak.value());
    slots.push_back(report.reduce_slots_peak.value());
    units.push_back(unit);
  }
  for (std::size_t i = 0; i < units.size(); ++i) {
    EXPECT_EQ(gathered[i], 2 * units[i]);
    EXPECT_LE(slots[i], 2 * units[i]);
  }
}

TEST(GpuMemory, ALateFirstPrefetchLowersThePeakAndChangesNoBit) {
  std::vector<at::Tensor> expected;
  std::int64_t peaks[2] = {};
  for (const bool late : {false, true}) {
    ContextOptions options;
    options.late_first_prefetch = late;
    const World world = World::loopback({.size = 4});
    GpuRun run(world, options, {}, 6, 1024);
    for (int step = 0; step < 3; ++step) {
      run.loss(static_cast<std::uint64_t>(step)).backward();
      for (auto* group : run.context->groups()) group->zero_gradients(/*set_to_none=*/true);
    }
    world.runtime()->reset_device_peak();
    run.loss(3).backward();
    peaks[late ? 1 : 0] = world.runtime()->device_memory().peak.value();
    std::vector<at::Tensor> gradients;
    for (auto* group : run.context->groups())
      gradients.push_back(group->gradient_slice(group->main_weight().range()).cpu());
    if (late)
      expect_equal(gradients, expected, "late first prefetch");
    else
      expected = gradients;
  }
  EXPECT_LE(peaks[1], peaks[0]);
}

TEST(GpuMemory, NothingGrowsOverSteps) {
  const World world = World::loopback({.size = 4});
  GpuRun run(world, {}, {}, 6, 512);
  AdamW optimizer(*run.context, {.learning_rate = 1e-3});
  std::int64_t before = 0;
  for (int step = 0; step < 40; ++step) {
    run.loss(static_cast<std::uint64_t>(step)).backward();
    optimizer.step(clip_grad_norm_(*run.context, 1.0));
    optimizer.zero_grad();
    if (step == 4) before = world.runtime()->device_memory().in_use.value();
  }
  EXPECT_EQ(world.runtime()->device_memory().in_use.value(), before);
}

}  // namespace
}  // namespace fsdp::testing
