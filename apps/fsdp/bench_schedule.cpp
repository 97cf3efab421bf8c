#include "apps/fsdp/bench_schedule.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/randint.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "apps/fsdp/console.h"
#include "fsdp/base/check.h"
#include "fsdp/mesh/cuda_world.h"
#include "fsdp/mesh/spawn_ranks.h"
#include "fsdp/pipeline/step_driver.h"
#include "fsdp/runtime/device_profile.h"
#include "fsdp/trace/chrome_writer.h"
#include "fsdp/trace/overlap.h"
#include "models/moe_transformer.h"
#include "models/presets.h"

namespace fsdp::app {
namespace {

using Clock = std::chrono::steady_clock;

struct Mode {
  const char* name;
  pipeline::StepOptions options;
};

std::vector<Mode> modes() {
  return {
      {"sequential", {.schedule = pipeline::Schedule::sequential, .delay_weights = false}},
      {"1f1b", {}},
      {"1f1b, weights not delayed", {.delay_weights = false}},
      {"1f1b, early release", {.release_early = true}},
      {"1f1b, gathers on demand", {.gather_ahead = 0}},
  };
}

struct Run {
  Run(const World& world, const models::MoeConfig& config, const pipeline::StepOptions& options,
      const ContextOptions& context_options = {})
      : mesh(world, {{"edp", 1}, {"ep", world.size()}}),
        model(std::make_shared<models::MoeTransformer>(config, mesh)),
        context(FsdpContext::create(mesh, context_options)) {
    UnitOptions unit;
    unit.mixed_precision.param_dtype = at::kBFloat16;
    model->shard(*context, unit);
    if (world.runtime()->device().is_meta())
      context->finalize();
    else
      context->materialize(model->initializer());
    driver = std::make_unique<pipeline::StepDriver>(context, model, options);
  }
  void step(int microbatches, const at::Tensor& tokens) {
    driver->run(std::vector<pipeline::Microbatch>(static_cast<std::size_t>(microbatches), {{tokens}, {tokens}}));
    for (auto* group : context->groups()) group->zero_gradients(/*set_to_none=*/true);
  }
  DeviceMesh mesh;
  std::shared_ptr<models::MoeTransformer> model;
  std::shared_ptr<FsdpContext> context;
  std::unique_ptr<pipeline::StepDriver> driver;
};

nlohmann::json describe(const BenchScheduleCommand& command, const Mode& mode, const std::vector<trace::Span>& spans,
                        const Run& run) {
  const auto report = trace::overlap_report(spans);
  trace::Nanoseconds exchange = 0, hidden = 0;
  int exchanges = 0;
  for (const auto& collective : report.collectives) {
    if (collective.span.kind != trace::Kind::all_to_all) continue;
    ++exchanges;
    exchange += collective.duration();
    hidden += collective.hidden;
  }
  return {{"bench", "schedule"},
          {"preset", command.preset},
          {"clock", command.simulated ? "virtual" : "device"},
          {"loopback", command.nccl        ? "none: NCCL"
                       : command.simulated ? "simulated"
                                           : "link"},
          {"schedule", mode.name},
          {"layers", command.layers},
          {"tokens", command.sequences * command.context},
          {"ranks", command.ranks},
          {"microbatches", command.microbatches},
          {"exchanges", exchanges},
          {"exchange_us", static_cast<double>(exchange) * 1e-3},
          {"exchange_hidden", exchange > 0 ? static_cast<double>(hidden) / static_cast<double>(exchange) : 0},
          {"exposed_us", static_cast<double>(report.exposed) * 1e-3},
          {"compute_us", static_cast<double>(report.compute) * 1e-3},
          {"elapsed_us", static_cast<double>(report.elapsed) * 1e-3},
          {"peak_gathered_units", run.context->counters().peak_gathered_units}};
}

void write_trace(const BenchScheduleCommand& command, const Mode& mode, const std::vector<trace::Span>& spans) {
  if (command.trace.empty() || std::string(mode.name) != "1f1b") return;
  std::map<int, std::string> streams{{0, "compute"}};
  for (const auto& span : spans) {
    if (span.stream != 0) streams.try_emplace(span.stream, trace::to_string(span.kind));
  }
  trace::write_chrome_trace(command.trace, spans, 0, streams);
}

int on_virtual_clock(const BenchScheduleCommand& command, const models::MoeConfig& config) {
  CostModel costs;
  costs.link_bytes_per_second = command.link_gigabytes_per_second * 1e9;
  for (const Mode& mode : modes()) {
    const World world = World::simulated(command.ranks, costs);
    const auto recorder = std::make_shared<trace::Recorder>();
    Run run(world, config, mode.options, {.recorder = recorder});
    const auto tokens =
        at::empty({command.sequences, command.context}, at::TensorOptions().dtype(at::kLong).device(at::kMeta));
    for (int step = 0; step < 2; ++step) {  // the second is steady
      recorder->clear();
      run.step(command.microbatches, tokens);
    }
    const auto spans = recorder->spans();
    console::print(describe(command, mode, spans, run).dump());
    write_trace(command, mode, spans);
  }
  return 0;
}

int on_device(const BenchScheduleCommand& command, const models::MoeConfig& config) {
  if (command.nccl) {
    static_cast<void>(uses_cuda(DeviceKind::cuda));  // says once why it cannot be
    if (const auto code = spawn_ranks(command.ranks)) return *code;
  }
  const World world = command.nccl ? World::from_environment({.device = DeviceKind::cuda})
                                   : World::loopback({.size = command.ranks, .mode = LoopbackOptions::Mode::link});
  Runtime& runtime = *world.runtime();
  const auto wait = [&] { runtime.compute_stream().synchronize(); };
  const auto options = at::TensorOptions().dtype(at::kLong).device(runtime.device());
  const auto tokens = at::randint(config.base.vocabulary, {command.sequences, command.context}, options);
  for (const Mode& mode : modes()) {
    const auto before = runtime.device_memory().in_use;
    Run run(world, config, mode.options);
    const auto step = [&] { run.step(command.microbatches, tokens); };
    for (int i = 0; i < 3; ++i) step();
    wait();
    runtime.reset_device_peak();
    step();
    wait();
    const auto peak = runtime.device_memory().peak - before;
    std::vector<double> times;
    for (int i = 0; i < command.rounds; ++i) {
      const auto start = Clock::now();
      step();
      wait();
      times.push_back(std::chrono::duration<double, std::milli>(Clock::now() - start).count());
    }
    std::nth_element(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2), times.end());
    trace::Recorder names;
    const auto spans = profile_device(
        [&] {
          step();
          wait();
        },
        names);
    auto line = describe(command, mode, spans, run);
    line["step_ms"] = times[times.size() / 2];
    line["peak_gib"] = static_cast<double>(peak.value()) / (1 << 30);
    if (world.rank() != Rank(0)) continue;
    console::print(line.dump());
    write_trace(command, mode, spans);
  }
  return 0;
}

}  // namespace

int bench_schedule(const BenchScheduleCommand& command) {
  auto found = models::find_moe_preset(command.preset);
  FSDP_CHECK(found && found->experts > 0, UsageError, "--preset: expected a mixture of experts, got \"{}\"",
             command.preset);
  models::MoeConfig config = *found;
  config.base.layers = command.layers;
  FSDP_CHECK(command.layers > config.dense_layers, UsageError,
             "--layers: the first {} layers of {} have no experts; expected at least {}, got {}", config.dense_layers,
             command.preset, config.dense_layers + 1, command.layers);
  config.base.max_context = std::max(config.base.max_context, command.context);
  return command.simulated ? on_virtual_clock(command, config) : on_device(command, config);
}

}  // namespace fsdp::app
