// Several ranks over NCCL: one a GPU, or all on one GPU over sockets (FSDP_SHARE_GPU). Starts its own processes:
//   gpu_ranks_test RANKS [gtest options]      every test runs on all ranks
//   gpu_ranks_test RANKS --scenario killed|order|leak|long
// A scenario that must fail ends with the error of a rank on stderr and a code other than 0.
#include <ATen/ops/allclose.h>
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <optional>

#include "fsdp/mesh/spawn_ranks.h"
#include "tests/gpu/moe_gpu.h"
#include "tests/gpu/ranks.h"

namespace fsdp::testing {

std::optional<World> the_world;
World& world() { return *the_world; }

namespace {

struct Training {
  UnitOptions unit;
  ContextOptions options;
  int microbatches = 2, steps = 3;
};

std::vector<at::Tensor> train_sharded(const Training& t, const DeviceMesh& mesh) {
  GpuRun run(world(), mesh, t.options, t.unit, 4, 64);
  Sgd optimizer(*run.context, {.learning_rate = 0.1, .momentum = 0.9});
  for (int step = 0; step < t.steps; ++step) {
    for (int micro = 0; micro < t.microbatches; ++micro) {
      auto scope = run.context->microbatch({.is_last = micro + 1 == t.microbatches});
      run.loss(static_cast<std::uint64_t>(step * t.microbatches + micro)).backward();
    }
    optimizer.step();
    optimizer.zero_grad();
  }
  return run.weights();
}

std::vector<at::Tensor> train_sharded(const Training& t) {
  return train_sharded(t, DeviceMesh(world(), {{"dp", size()}}));
}

// Every rank's backwards in one process, added up in rank order.
std::vector<at::Tensor> train_unsharded(const Training& t) {
  UnitOptions unit = t.unit;
  unit.gradient_divisor = size();
  const World one = World::single({.device = DeviceKind::cuda});
  GpuRun run(one, {}, unit);
  Sgd optimizer(*run.context, {.learning_rate = 0.1, .momentum = 0.9});
  for (int step = 0; step < t.steps; ++step) {
    for (int micro = 0; micro < t.microbatches; ++micro) {
      for (int r = 0; r < size(); ++r) {
        auto scope = run.context->microbatch({.is_last = micro + 1 == t.microbatches && r + 1 == size()});
        const auto seed =
            static_cast<std::uint64_t>(step * t.microbatches + micro) * 100 + static_cast<std::uint64_t>(r);
        const auto x = random({8, run.width}, seed).to(one.runtime()->device());
        fsdp::call(run.model, &GpuStackImpl::loss, x).backward();
      }
    }
    optimizer.step();
    optimizer.zero_grad();
  }
  return run.weights();
}

TEST(GpuRanks, EqualTheUnshardedRun) {
  Training t;
  t.microbatches = 1;
  const auto exact = train_unsharded(t);
  for (const auto& strategy : {zero3("dp"), zero2("dp"), zero1("dp"), ddp({"dp"})}) {
    t.unit.placements = strategy;
    const auto got = train_sharded(t);
    for (std::size_t i = 0; i < got.size(); ++i) {
      // Two ranks: a sum of two is the same in any order, and halves are exact.
      const bool equal = size() == 2 ? at::equal(got[i], exact[i]) : at::allclose(got[i], exact[i], 1e-5, 1e-6);
      EXPECT_TRUE(equal) << strategy.name << " " << i << " differs by "
                         << (got[i] - exact[i]).abs().max().item<double>();
    }
  }
  t.microbatches = 2;
  t.unit = {};
  const auto expected = train_unsharded(t);
  std::vector<at::Tensor> of_zero3;
  for (const auto& strategy : {zero3("dp"), zero2("dp"), zero1("dp"), ddp({"dp"})}) {
    t.unit.placements = strategy;
    t.options = {};
    const auto got = train_sharded(t);
    if (strategy.name == "zero3") of_zero3 = got;
    if (strategy.name == "zero2") expect_equal(got, of_zero3, "zero2 as zero3");
    for (std::size_t i = 0; i < got.size(); ++i)
      EXPECT_TRUE(at::allclose(got[i], expected[i], 1e-5, 1e-6)) << strategy.name << " " << i;
    for (const auto& prefetch : {Prefetch::none(), Prefetch::depth(2), Prefetch::delayed_release(2)}) {
      for (const int delay : {0, 1}) {
        t.options.prefetch = prefetch;
        t.options.reduction = {delay};
        t.options.unify_communication_stream = delay == 1;
        t.options.late_first_prefetch = delay == 1;
        expect_equal(train_sharded(t), got, strategy.name + " under other policies");
      }
    }
  }
}

// Every way to lay the ranks out as copies of shards, 2 x 2 among them.
TEST(GpuRanks, HybridMeshesEqualTheUnshardedRun) {
  Training t;
  const auto expected = train_unsharded(t);
  for (int copies = 1; copies <= size(); ++copies) {
    if (size() % copies != 0) continue;
    const DeviceMesh mesh(world(), {{"copies", copies}, {"dp", size() / copies}});
    for (const auto& strategy : {hsdp("copies", "dp"), hfsdp("copies", "dp")}) {
      t.unit.placements = strategy;
      for (const auto reducer : {Reducer::copy_engine, Reducer::kernel}) {
        for (const auto reduce : {ReducePolicy::every_microbatch, ReducePolicy::last_microbatch}) {
          t.options = {.reduce = reduce, .reducer = reducer};
          const auto got = train_sharded(t, mesh);
          for (std::size_t i = 0; i < got.size(); ++i)
            EXPECT_TRUE(at::allclose(got[i], expected[i], 1e-5, 1e-6))
                << strategy.name << " of " << copies << " copies, tensor " << i << " differs by "
                << (got[i] - expected[i]).abs().max().item<double>();
        }
      }
    }
  }
}

TEST(GpuRanks, LowPrecisionEqualsAcrossPolicies) {
  Training t;
  t.unit.mixed_precision.param_dtype = at::kBFloat16;
  for (const auto reduce_dtype : {at::kFloat, at::kBFloat16}) {
    t.unit.mixed_precision.reduce_dtype = reduce_dtype;
    t.options = {};
    const auto expected = train_sharded(t);
    t.options.prefetch = Prefetch::none();
    expect_equal(train_sharded(t), expected, "prefetch off");
    t.options.check = true;
    expect_equal(train_sharded(t), expected, "checked");
  }
}

// Reads of the peers' shares wait for nobody. Half of the ranks read late, the others go on to evaluate, to read
// weights and to write new ones: nobody reads what is not written yet, or written again.
TEST(GpuRanks, ReadsOfPeersGiveTheSameBitsHoweverRanksDrift) {
  setenv("FSDP_READ_PEERS_FROM_MIB", "0", 1);
  struct Restore {
    ~Restore() { unsetenv("FSDP_READ_PEERS_FROM_MIB"); }
  } restore;
  for (const bool low_precision : {false, true}) {
    const auto train = [&](bool one_sided, bool late) {
      UnitOptions unit;
      if (low_precision) {
        unit.mixed_precision.param_dtype = at::kBFloat16;
        unit.mixed_precision.reduce_dtype = at::kFloat;
      }
      const std::int64_t spin = late && world().rank().value() % 2 == 1 ? 2'000'000 : 0;
      // Groups that are held up have no registered memory, and all ranks must agree on it.
      GpuRun run(world(), slow_mesh(world(), spin, 0), {.symmetric_memory = false, .one_sided_gathers = one_sided},
                 unit, 4, 64);
      run.prepare_inputs(5);
      AdamW optimizer(*run.context, {.learning_rate = 1e-2});
      std::vector<at::Tensor> seen;
      for (std::uint64_t step = 0; step < 4; ++step) {
        run.loss(step).backward();
        {
          at::NoGradGuard no_grad;
          seen.push_back(run.loss(step + 1));
        }
        optimizer.step();
        optimizer.zero_grad();
        {
          at::NoGradGuard no_grad;
          auto scope = run.context->unshard_scope(*run.context->units()[1]);
          for (const auto& group : run.context->units()[1]->groups())
            seen.push_back(group->parameters()[0].parameter.clone());
        }
        {
          at::NoGradGuard no_grad;  // leaves written by hand, behind an evaluation
          for (auto& leaf : run.context->parameters()) leaf.mul_(0.999);
        }
      }
      const auto counters = run.context->counters();
      EXPECT_EQ(counters.one_sided_gathers, one_sided ? counters.unshards : 0);
      for (auto& weight : run.weights()) seen.push_back(std::move(weight));
      for (auto& tensor : seen) tensor = tensor.cpu();
      return seen;
    };
    const auto expected = train(false, false);
    expect_equal(train(true, false), expected, "reads of peers");
    expect_equal(train(true, true), expected, "late reads of peers");
  }
}

TEST(GpuRanks, ReductionsByCopyEngineEqualThoseByKernel) {
  Training t;
  for (const auto param_dtype : {at::kFloat, at::kBFloat16}) {
    for (const auto reduce_dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
      t.unit.mixed_precision.param_dtype = param_dtype;
      // Double: in the main gradient alone, whose sums must not lose it.
      const auto main_dtype = reduce_dtype == at::kDouble ? at::kDouble : at::kFloat;
      t.unit.mixed_precision.reduce_dtype = reduce_dtype == at::kDouble ? at::kFloat : reduce_dtype;
      t.unit.mixed_precision.main_param_dtype = t.unit.mixed_precision.main_grad_dtype = main_dtype;
      t.options.reducer = Reducer::kernel;
      const auto expected = train_sharded(t);
      t.options.reducer = Reducer::copy_engine;
      const auto got = train_sharded(t);
      if (size() == 2) {
        expect_equal(got, expected, "a sum of two");
      } else {
        const double tolerance = reduce_dtype == at::kFloat ? 1e-5 : 2e-2;
        for (std::size_t i = 0; i < got.size(); ++i)
          EXPECT_TRUE(at::allclose(got[i], expected[i], tolerance, tolerance));
      }
    }
  }
}

TEST(GpuRanks, OptimizersThatOverlapReductionsGiveTheSameBits) {
  const auto train = [](bool overlap) {
    GpuRun run(world(), {.overlap_optimizer = overlap});
    AdamW optimizer(*run.context, {.learning_rate = 1e-2});
    for (int step = 0; step < 4; ++step) {
      run.loss(static_cast<std::uint64_t>(step)).backward();
      if (step % 2 == 0)
        optimizer.step(clip_grad_norm_(*run.context, 0.5));
      else
        optimizer.step();
      optimizer.zero_grad();
    }
    return run.weights();
  };
  expect_equal(train(true), train(false), "overlapping");
}

// Experts spread over all ranks, merged schedule, beside one process that runs every rank's microbatches.
TEST(GpuRanks, MixturesOfExpertsEqualOneProcess) {
  constexpr int kMicrobatches = 3, kSteps = 3;
  for (const bool low_precision : {false, true}) {
    UnitOptions unit;
    if (low_precision) {
      unit.mixed_precision.param_dtype = at::kBFloat16;
      unit.mixed_precision.reduce_dtype = at::kFloat;
    }
    MoeGpuRun run(world(), DeviceMesh(world(), {{"edp", 1}, {"ep", size()}}), {}, unit);
    const World one = World::single({.device = DeviceKind::cuda});
    MoeGpuRun reference(one, DeviceMesh(one, {{"edp", 1}, {"ep", 1}}),
                        {.schedule = pipeline::Schedule::sequential, .delay_weights = false}, unit);
    Sgd optimizer(*run.context, {.learning_rate = 0.1, .momentum = 0.9}),
        reference_optimizer(*reference.context, {.learning_rate = 0.1, .momentum = 0.9});
    for (int step = 0; step < kSteps; ++step) {
      const auto seed = static_cast<std::uint64_t>(step);
      run.driver->run(run.batches(kMicrobatches, seed));
      std::vector<pipeline::Microbatch> all;
      for (int r = 0; r < size(); ++r) {
        for (auto& batch : reference.batches(kMicrobatches, seed, r)) all.push_back(std::move(batch));
      }
      reference.driver->run(std::move(all));
      for (auto* o : {&optimizer, &reference_optimizer}) {
        auto& context = o == &optimizer ? *run.context : *reference.context;
        o->step(clip_grad_norm_(context, 1.0));
        o->zero_grad();
      }
    }
    const auto got = run.weights(), expected = reference.weights();
    const auto own = run.model->exchange()->own_experts(), first = run.model->exchange()->first_own_expert();
    for (std::size_t i = 0; i < got.size(); ++i) {
      const at::Tensor whole = expected[i].dim() == 3 ? expected[i].narrow(0, first, own) : expected[i];
      EXPECT_TRUE(at::allclose(got[i], whole, low_precision ? 1e-3 : 1e-5, low_precision ? 5e-3 : 1e-5))
          << i << " differs by " << (got[i] - whole).abs().max().item<double>() << (low_precision ? " in bf16" : "");
    }
  }
}

// Every rank a pipeline stage of two parts, beside one process that holds the whole model.
TEST(GpuRanks, PipelineStagesEqualOneProcess) {
  constexpr int kChunks = 2, kSteps = 3;
  models::MoeConfig config = MoeGpuRun::config();
  config.base.layers = kChunks * size();
  const int microbatches = 2 * size();
  const DeviceMesh mesh(world(), {{"pp", size()}, {"edp", 1}, {"ep", 1}});
  const auto parts = models::MoeTransformer::parts(config, mesh, kChunks);
  auto context = FsdpContext::create(mesh);
  for (const auto& part : parts) part->shard(*context, {});
  context->materialize(moe_values(0));
  pipeline::StepDriver driver(context, std::vector<std::shared_ptr<pipeline::StagedModel>>(parts.begin(), parts.end()),
                              pipeline::StageChannels::create(mesh, "pp"), {});
  const World one = World::single({.device = DeviceKind::cuda});
  MoeGpuRun reference(one, DeviceMesh(one, {{"edp", 1}, {"ep", 1}}),
                      {.schedule = pipeline::Schedule::sequential, .delay_weights = false}, {}, config);
  Sgd optimizer(*context, {.learning_rate = 0.1, .momentum = 0.9}),
      reference_optimizer(*reference.context, {.learning_rate = 0.1, .momentum = 0.9});
  for (int step = 0; step < kSteps; ++step) {
    const auto seed = static_cast<std::uint64_t>(step);
    driver.run(reference.batches(microbatches, seed, 0));
    reference.driver->run(reference.batches(microbatches, seed, 0));
    optimizer.step(clip_grad_norm_(*context, 1.0));
    reference_optimizer.step(clip_grad_norm_(*reference.context, 1.0));
    optimizer.zero_grad();
    reference_optimizer.zero_grad();
  }
  for (auto& [name, leaf] : context->named_parameters()) {
    const at::Tensor got = context->full_parameter(name).cpu();
    const at::Tensor expected = reference.context->full_parameter(name).cpu();
    EXPECT_TRUE(at::allclose(got, expected, 1e-4, 1e-5))
        << name << " differs by " << (got - expected).abs().max().item<double>();
  }
}

TEST(GpuRanks, ReplayOfACapturedStepEqualsEager) {
  UnitOptions unit;
  unit.mixed_precision.param_dtype = at::kBFloat16;
  unit.mixed_precision.reduce_dtype = at::kFloat;
  GpuRun eager(world(), {}, unit), captured(world(), {}, unit);
  AdamW eager_optimizer(*eager.context, {.learning_rate = 1e-2}),
      captured_optimizer(*captured.context, {.learning_rate = 1e-2});
  const at::Tensor input = random({8, 64}, 7 + static_cast<std::uint64_t>(rank())).to(world().runtime()->device());
  const auto step = [&](GpuRun& run, AdamW& optimizer) {
    const auto loss = fsdp::call(run.model, &GpuStackImpl::loss, input);
    loss.backward();
    optimizer.step(clip_grad_norm_(*run.context, 1.0));
    optimizer.zero_grad();
    return loss.detach();
  };
  std::optional<FsdpContext::CapturedStep> graph;
  for (int i = 0; i < 6; ++i) {
    if (i == 3) graph.emplace(captured.context->capture([&] { return step(captured, captured_optimizer); }));
    const auto a = step(eager, eager_optimizer).item<double>();
    const auto b = (graph ? graph->replay() : step(captured, captured_optimizer)).item<double>();
    EXPECT_EQ(a, b) << i;
  }
  expect_equal(captured.weights(), eager.weights(), "captured");
}

// A replay uses memory that ranks share, on a stream that the context does not know of.
TEST(GpuRanks, ContextsMayGoWhileAReplayRuns) {
  const at::Tensor input = random({8, 64}, 7 + static_cast<std::uint64_t>(rank())).to(world().runtime()->device());
  std::vector<std::vector<at::Tensor>> weights;
  for (int round = 0; round < 3; ++round) {
    std::optional<GpuRun> run;
    run.emplace(world());
    std::optional<AdamW> optimizer;
    optimizer.emplace(*run->context, AdamWOptions{.learning_rate = 1e-2});
    const auto step = [&] {
      const auto loss = fsdp::call(run->model, &GpuStackImpl::loss, input);
      loss.backward();
      optimizer->step();
      optimizer->zero_grad();
      return loss.detach();
    };
    for (int i = 0; i < 3; ++i) step();
    weights.push_back(run->weights());
    auto graph = std::make_unique<FsdpContext::CapturedStep>(run->context->capture(step));
    const Stream side = world().runtime()->make_stream("replay");
    side.enqueue([&] {
      world().runtime()->kernels()->spin(rank() % 2 * 5'000'000, 1);
      for (int i = 0; i < 20; ++i) graph->replay();
    });
    optimizer.reset();
    graph.reset();
    run.reset();
  }
  expect_equal(weights[1], weights[0], "after replays that were not waited for");
  expect_equal(weights[2], weights[0], "after replays that were not waited for");
}

// --- Scenarios, each a run of its own ---

int killed() {
  GpuRun run(world());
  for (int step = 0; step < 100; ++step) {
    if (step == 3 && rank() == size() - 1) kill(getpid(), SIGKILL);
    run.loss(static_cast<std::uint64_t>(step)).backward();
    world().runtime()->compute_stream().synchronize();
    for (auto* group : run.context->groups()) group->zero_gradients(true);
  }
  return 0;
}

int wrong_order() {
  ContextOptions options;
  options.check = true;
  GpuRun run(world(), options, {}, 2);
  struct Swapped {
    static at::Tensor forward(GpuStackImpl& m, at::Tensor x, bool swapped) {
      for (const std::size_t i : {swapped ? 1u : 0u, swapped ? 0u : 1u})
        x = m.layers->ptr<fsdp::Hooked<GpuLayerImpl>>(i)->forward(x);
      return x;
    }
  };
  const auto x = random({8, 64}, 1).to(world().runtime()->device());
  Swapped::forward(*run.model, x, rank() == 1).sum().backward();
  return 0;
}

// Communicators made and dropped leave no memory behind.
int leak() {
  std::int64_t before = 0;
  for (int i = 0; i < 6; ++i) {
    {
      DeviceMesh mesh(world(), {{"dp", size()}});
      GpuRun run(world(), mesh, {}, {}, 2, 64);
      run.loss(1).backward();
      world().runtime()->compute_stream().synchronize();
    }
    const auto free = world().runtime()->device_memory().free.value();
    if (i == 1) before = free;
    if (rank() == 0) std::printf("after %d meshes: %lld MiB free\n", i + 1, static_cast<long long>(free >> 20));
  }
  const auto lost = before - world().runtime()->device_memory().free.value();
  if (rank() == 0)
    std::printf("{\"bench\": \"communicator_leak\", \"ranks\": %d, \"lost_mib\": %lld}\n", size(),
                static_cast<long long>(lost >> 20));
  return lost > (64 << 20) ? 1 : 0;
}

// A thousand steps beside the unsharded run.
int long_run() {
  constexpr int kSteps = 1000;
  UnitOptions sharded, whole;
  whole.gradient_divisor = size();
  GpuRun run(world(), {}, sharded);
  const World one = World::single({.device = DeviceKind::cuda});
  GpuRun reference(one, {}, whole);
  AdamW optimizer(*run.context, {.learning_rate = 1e-3}),
      reference_optimizer(*reference.context, {.learning_rate = 1e-3});
  std::int64_t before = 0, free_before = 0;
  for (int step = 0; step < kSteps; ++step) {
    run.loss(static_cast<std::uint64_t>(step)).backward();
    optimizer.step(clip_grad_norm_(*run.context, 1.0));
    optimizer.zero_grad();
    for (int r = 0; r < size(); ++r) {
      auto scope = reference.context->microbatch({.is_last = r + 1 == size()});
      const auto x = random({8, 64}, static_cast<std::uint64_t>(step) * 100 + static_cast<std::uint64_t>(r))
                         .to(one.runtime()->device());
      fsdp::call(reference.model, &GpuStackImpl::loss, x).backward();
    }
    reference_optimizer.step(clip_grad_norm_(*reference.context, 1.0));
    reference_optimizer.zero_grad();
    if (step == 20) {
      before = world().runtime()->device_memory().in_use.value();
      free_before = world().runtime()->device_memory().free.value();
    }
  }
  const auto memory = world().runtime()->device_memory();
  const auto a = run.weights(), b = reference.weights();
  double worst = 0;
  for (std::size_t i = 0; i < a.size(); ++i) worst = std::max(worst, (a[i] - b[i]).abs().max().item<double>());
  if (rank() == 0) {
    std::printf(
        "{\"bench\": \"long_run\", \"ranks\": %d, \"steps\": %d, \"largest_difference\": %.3g, "
        "\"allocator_growth_bytes\": %lld, \"device_growth_mib\": %lld}\n",
        size(), kSteps, worst, static_cast<long long>(memory.in_use.value() - before),
        static_cast<long long>((free_before - memory.free.value()) >> 20));
  }
  return worst < 1e-4 && memory.in_use.value() == before ? 0 : 1;
}

int scenario(const std::string& name) {
  if (name == "killed") return killed();
  if (name == "order") return wrong_order();
  if (name == "leak") return leak();
  if (name == "long") return long_run();
  std::fprintf(stderr, "no scenario \"%s\"\n", name.c_str());
  return 2;
}

int main_of_rank(int argc, char** argv) {
  const bool has_scenario = argc > 3 && std::string(argv[2]) == "--scenario";
  const auto deadline = std::chrono::seconds(has_scenario ? 5 : 60);
  the_world.emplace(World::from_environment({.device = DeviceKind::cuda, .deadline = deadline}));
  int code = 0;
  if (has_scenario) {
    try {
      code = scenario(argv[3]);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "rank %d: %s\n", rank(), error.what());
      world().abort(error.what());
      std::fflush(stderr);
      _exit(1);  // what runs on the device may wait for a peer
    }
  } else {
    ::testing::InitGoogleTest(&argc, argv);
    if (rank() != 0)
      delete ::testing::UnitTest::GetInstance()->listeners().Release(
          ::testing::UnitTest::GetInstance()->listeners().default_result_printer());
    code = RUN_ALL_TESTS();
    if (code != 0 && rank() != 0) std::fprintf(stderr, "rank %d: tests failed\n", rank());
  }
  std::fflush(stdout);
  the_world.reset();
  return code;
}

}  // namespace
}  // namespace fsdp::testing

int main(int argc, char** argv) {
  const int ranks = argc > 1 ? std::atoi(argv[1]) : 2;
  fsdp::log::set_sink([](fsdp::log::Level level, std::string_view message) {
    if (level == fsdp::log::Level::warning)
      std::fprintf(stderr, "%.*s\n", static_cast<int>(message.size()), message.data());
  });
  if (const auto code = fsdp::spawn_ranks(ranks)) return *code;
  return fsdp::testing::main_of_rank(argc, argv);
}
