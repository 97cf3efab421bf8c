// What users of other systems report as slow, counted on the device: launches, copies, gathers and their order
// (docs/testing.md has the list).
#include <ATen/ops/cat.h>

#include <algorithm>
#include <set>
#include <string>

#include "fsdp/runtime/device_profile.h"
#include "tests/gpu/gpu.h"

namespace fsdp::testing {
namespace {

struct Launches {
  Launches(Runtime& runtime, const std::function<void()>& step) {
    spans = profile_device(
        [&] {
          step();
          runtime.compute_stream().synchronize();
        },
        names);
  }
  [[nodiscard]] std::vector<std::string> on_compute() const {
    std::vector<std::string> found;
    for (const auto& span : spans) {
      if (span.stream == 0) found.emplace_back(span.name);
    }
    return found;
  }
  [[nodiscard]] std::vector<std::string> of(trace::Kind kind) const {
    std::vector<std::string> found;
    for (const auto& span : spans) {
      if (span.kind == kind) found.emplace_back(span.name);
    }
    return found;
  }
  [[nodiscard]] std::ptrdiff_t own_kernels() const {
    return std::count_if(spans.begin(), spans.end(),
                         [](const auto& span) { return std::string_view(span.name).starts_with("fsdp_"); });
  }
  trace::Recorder names;
  std::vector<trace::Span> spans;
};

// Many small parameters that one operator uses.
struct CrowdImpl : torch::nn::Module {
  explicit CrowdImpl(int count, std::int64_t each = 256) {
    for (int i = 0; i < count; ++i)
      parts.push_back(
          register_parameter("p" + std::to_string(i), random({each}, static_cast<std::uint64_t>(i) + 1).clone()));
  }
  at::Tensor forward(at::Tensor x) { return at::mean(at::square(at::cat(parts)) * x); }
  std::vector<at::Tensor> parts;
};
FSDP_MODULE(Crowd);

struct CrowdRun {
  explicit CrowdRun(int count) : world(World::loopback({.size = 4})), model(count) {
    context = FsdpContext::create(DeviceMesh(world, {{"dp", 4}}));
    context->fully_shard(model);
    context->finalize();
  }
  void step() { model->forward(at::ones({1}, at::TensorOptions().device(kGpu))).backward(); }
  World world;
  std::shared_ptr<FsdpContext> context;
  Crowd model;
};

TEST(GpuReports, SharedWorkOfAUnitDoesNotGrowWithItsParameters) {
  std::vector<std::ptrdiff_t> kernels, communication;
  for (const int count : {4, 60}) {
    CrowdRun run(count);
    for (int i = 0; i < 3; ++i) run.step();
    const Launches seen(*run.world.runtime(), [&] { run.step(); });
    kernels.push_back(seen.own_kernels());
    communication.push_back(static_cast<std::ptrdiff_t>(seen.of(trace::Kind::all_gather).size() +
                                                        seen.of(trace::Kind::reduce_scatter).size()));
  }
  EXPECT_GT(kernels[0], 0);
  EXPECT_EQ(kernels[0], kernels[1]);
  EXPECT_EQ(communication, (std::vector<std::ptrdiff_t>{2, 2}));
}

TEST(GpuReports, AnOptimizerStepOfManyTensorsIsFewKernels) {
  constexpr int kTensors = 2000;
  CrowdRun run(kTensors);
  AdamW optimizer(*run.context, {.learning_rate = 1e-3});
  run.step();
  optimizer.step();
  const Launches seen(*run.world.runtime(), [&] { optimizer.step(); });
  const auto launches = std::ssize(seen.spans);
  EXPECT_GT(seen.own_kernels(), 0);
  EXPECT_LT(launches, kTensors / 10);
}

// Weights are computed with where they were gathered, gradients written where they are reduced, and divided on the way:
// one kernel a unit packs what no product could write (bias and gain) and marks what was used.
TEST(GpuReports, ShardingAddsOneKernelAUnitToTheComputeStream) {
  constexpr int kLayers = 4;
  constexpr std::int64_t kWidth = 256;
  GpuRun sharded(World::loopback({.size = 4}), {}, {}, kLayers, kWidth);
  GpuStack whole(kLayers, kWidth);
  whole->to(kGpu);
  sharded.prepare_inputs(2);
  const at::Tensor input = sharded.input(1);
  const auto sharded_step = [&] { sharded.loss(1).backward(); };
  const auto whole_step = [&] {
    whole->loss(input).backward();
    for (auto& parameter : whole->parameters()) parameter.mutable_grad().reset();
  };
  const auto sharded_kernels = [&] {
    for (auto* group : sharded.context->groups()) group->zero_gradients(/*set_to_none=*/true);
    return Launches(*sharded.world.runtime(), sharded_step).on_compute();
  };
  for (int i = 0; i < 3; ++i) {
    sharded_step();
    whole_step();
  }
  const auto with = sharded_kernels();
  const auto without = Launches(*sharded.world.runtime(), whole_step).on_compute();
  std::multiset<std::string> added(with.begin(), with.end());
  for (const auto& name : without) {
    if (const auto found = added.find(name); found != added.end()) added.erase(found);
  }
  std::string list;
  for (const auto& name : added) list += "\n" + name;
  EXPECT_EQ(added.size(), static_cast<std::size_t>(kLayers)) << list;
  for (const auto& name : added) EXPECT_TRUE(name.starts_with("fsdp_pack")) << name;
}

TEST(GpuReports, EveryGatherIsAheadOfItsUseAndTheLastUnitIsGatheredOnce) {
  constexpr int kLayers = 5, kSteps = 3;
  GpuRun run(World::loopback({.size = 4}), {}, {}, kLayers, 64);
  run.loss(0).backward();
  const auto before = run.context->counters();
  for (int step = 0; step < kSteps; ++step) {
    run.context->weights_changed();
    run.loss(1).backward();
  }
  const auto after = run.context->counters();
  EXPECT_EQ(after.unshards - before.unshards, kSteps * (2 * kLayers - 1));
  EXPECT_EQ(after.prefetched, after.unshards);
  EXPECT_EQ(after.reductions - before.reductions, kSteps * kLayers);
}

// "layers.1" is a part of "layers.10": gathers go by the order of execution.
TEST(GpuReports, GathersFollowTheOrderOfExecution) {
  constexpr int kLayers = 12;
  GpuRun run(World::loopback({.size = 4}), {}, {}, kLayers, 64);
  for (int i = 0; i < 2; ++i) run.loss(1).backward();
  const auto seen = Launches(*run.world.runtime(), [&] { run.loss(1).backward(); }).of(trace::Kind::all_gather);
  std::vector<std::string> expected;
  for (int i = 0; i < kLayers; ++i) expected.push_back("FSDP:layers." + std::to_string(i) + ":unshard");
  for (int i = kLayers - 1; i-- > 0;) expected.push_back("FSDP:layers." + std::to_string(i) + ":unshard");
  EXPECT_EQ(seen, expected);
}

TEST(GpuReports, AFrozenBaseThatStaysIsGatheredOnceAStep) {
  constexpr int kLayers = 4, kMicrobatches = 4;
  const World world = World::loopback({.size = 4});
  GpuStack model(kLayers, 64);
  for (int i = 0; i + 1 < kLayers; ++i) {
    for (auto& parameter : (*model->layers)[static_cast<std::size_t>(i)]->parameters())
      parameter.set_requires_grad(false);
  }
  auto context = FsdpContext::create(DeviceMesh(world, {{"dp", 4}}));
  for (int i = 0; i < kLayers; ++i) {
    UnitOptions unit;
    unit.reshard = i + 1 < kLayers ? Reshard::never : Reshard::after_forward;
    context->fully_shard((*model->layers)[static_cast<std::size_t>(i)], unit);
  }
  context->fully_shard(model);
  context->finalize();
  const at::Tensor x = random_on_gpu({8, 64}, 1);
  const auto step = [&] {
    for (int micro = 0; micro < kMicrobatches; ++micro) {
      auto scope = context->microbatch({.is_last = micro + 1 == kMicrobatches});
      fsdp::call(model, &GpuStackImpl::loss, x).backward();
    }
  };
  step();
  const Launches seen(*world.runtime(), step);
  std::map<std::string, int> gathers;
  for (const auto& name : seen.of(trace::Kind::all_gather)) ++gathers[name];
  for (int i = 0; i + 1 < kLayers; ++i)
    EXPECT_LE(gathers["FSDP:layers." + std::to_string(i) + ":unshard"], 1) << "frozen layer " << i;
  EXPECT_GE(gathers["FSDP:layers.3:unshard"], kMicrobatches);
  EXPECT_EQ(seen.of(trace::Kind::reduce_scatter).size(), static_cast<std::size_t>(kMicrobatches));
}

}  // namespace
}  // namespace fsdp::testing
