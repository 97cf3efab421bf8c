#include "apps/fsdp/bench_overlap.h"

#include <ATen/Context.h>
#include <ATen/ops/ones_like.h>
#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "apps/fsdp/bench_model.h"
#include "apps/fsdp/console.h"
#include "fsdp/base/check.h"
#include "fsdp/mesh/cuda_world.h"
#include "fsdp/mesh/device_mesh.h"
#include "fsdp/mesh/spawn_ranks.h"
#include "fsdp/runtime/device_profile.h"
#include "fsdp/trace/chrome_writer.h"
#include "fsdp/trace/overlap.h"

namespace fsdp::app {
namespace {

Strategy strategy_of(const std::string& name) {
  if (name == "zero1") return zero1({"dp"});
  if (name == "zero2") return zero2({"dp"});
  FSDP_CHECK(name == "zero3", UsageError, "--strategy: expected zero1, zero2 or zero3, got \"{}\"", name);
  return zero3("dp");
}

Prefetch prefetch_of(const BenchOverlapCommand& command) {
  if (command.prefetch == "none") return Prefetch::none();
  if (command.prefetch == "lists") return Prefetch::lists();
  if (command.prefetch == "recorded") return Prefetch::recorded(command.amount);
  if (command.prefetch == "delayed_release") return Prefetch::delayed_release(command.amount);
  FSDP_CHECK(command.prefetch == "depth", UsageError,
             "--prefetch: expected depth, lists, none, recorded or delayed_release, got \"{}\"", command.prefetch);
  return Prefetch::depth(command.amount);
}

struct Counts {
  int gathers = 0, gathers_hidden = 0, reductions = 0, reductions_hidden = 0;
};

// What the schedule promises to hide of the collectives of a step, for units whose compute is longer than their
// collectives: all but the first gather of each pass, and the last reduction of each microbatch.
Counts promised(const BenchOverlapCommand& command, int gathers, int reductions) {
  const int m = command.microbatches;
  const bool zero3 = command.strategy == "zero3", zero1 = command.strategy == "zero1";
  const bool turn_is_exposed = zero3 && !command.keep_last && command.prefetch != "delayed_release";
  return {gathers, gathers - (zero3 ? m : 1) * (turn_is_exposed ? 2 : 1), reductions, reductions - (zero1 ? 1 : m)};
}

}  // namespace

int bench_overlap(const BenchOverlapCommand& command) {
  const BenchShape shape = bench_shape(command.shape);
  if (command.nccl) {
    static_cast<void>(uses_cuda(DeviceKind::cuda));  // says once why it cannot be
    if (const auto code = spawn_ranks(command.ranks)) return *code;
  }
  const World world = command.nccl ? World::from_environment({.device = DeviceKind::cuda})
                                   : World::loopback({.size = command.ranks,
                                                      .mode = LoopbackOptions::Mode::link,
                                                      .gather_multiprocessors = command.gather_multiprocessors});
  Runtime& runtime = *world.runtime();
  if (command.carve_out > 0) {
    at::globalContext().setBlasPreferredBackend(at::BlasBackend::Cublaslt);  // the one that heeds it
    at::globalContext()._setSMCarveout_EXPERIMENTAL(command.carve_out);
  }
  BenchStack model(shape, /*own_linear=*/true, runtime.device());
  ContextOptions options;
  options.prefetch = prefetch_of(command);
  options.reduction = {command.delay};
  options.keep_last = command.keep_last;
  options.unify_communication_stream = command.unify;
  options.symmetric_memory = command.symmetric;
  options.one_sided_gathers = command.one_sided;
  if (command.reducer == "kernel") options.reducer = Reducer::kernel;
  auto context = FsdpContext::create(DeviceMesh(world, {{"dp", command.ranks}}), options);
  UnitOptions unit;
  unit.placements = strategy_of(command.strategy);
  shard_bench_stack(*context, model, unit);
  if (command.prefetch == "lists") {  // each unit names the one that follows
    for (int i = 0; i < static_cast<int>(shape.layers); ++i) {
      FsdpModule& layer = *context->units()[i];
      if (i + 1 < shape.layers) layer.set_forward_prefetch({context->units()[i + 1].get()});
      if (i > 0) layer.set_backward_prefetch({context->units()[i - 1].get()});
    }
  }
  at::Tensor input = bench_input(shape, runtime.device());
  const at::Tensor one = at::ones_like(input);
  const auto step = [&] {
    for (int micro = 0; micro < command.microbatches; ++micro) {
      auto scope = context->microbatch({.is_last = micro + 1 == command.microbatches});
      model->forward(input).backward(one);
      input.mutable_grad().reset();
    }
    for (auto* group : context->groups()) group->zero_gradients(/*set_to_none=*/true);
  };
  const auto wait = [&] { runtime.compute_stream().synchronize(); };
  for (int i = 0; i < 5; ++i) step();
  wait();
  Counts least{1 << 30, 1 << 30, 1 << 30, 1 << 30}, most;
  // In a row, as in training: the host is ahead of the device. The first is left out, for there it is not.
  trace::Recorder names;
  const auto spans = profile_device(
      [&] {
        for (int i = 0; i < command.steps + 1; ++i) step();
        wait();
      },
      names);
  const auto report = trace::overlap_report(spans);
  const auto of_kind = [&](trace::Kind kind) {
    std::vector<trace::CollectiveOverlap> some;
    std::copy_if(report.collectives.begin(), report.collectives.end(), std::back_inserter(some),
                 [&](const auto& c) { return c.span.kind == kind; });
    return some;
  };
  const auto gathers = of_kind(trace::Kind::all_gather), reductions = of_kind(trace::Kind::reduce_scatter);
  const auto hidden_in = [&](const std::vector<trace::CollectiveOverlap>& all, int step_index) {
    const auto each = all.size() / static_cast<std::size_t>(command.steps + 1);
    const auto begin = all.begin() + static_cast<std::ptrdiff_t>(each * static_cast<std::size_t>(step_index));
    return static_cast<int>(
        std::count_if(begin, begin + static_cast<std::ptrdiff_t>(each), [](const auto& c) { return c.overlapped(); }));
  };
  for (int i = 1; i <= command.steps; ++i) {
    const Counts counts{static_cast<int>(gathers.size()) / (command.steps + 1), hidden_in(gathers, i),
                        static_cast<int>(reductions.size()) / (command.steps + 1), hidden_in(reductions, i)};
    least = {std::min(least.gathers, counts.gathers), std::min(least.gathers_hidden, counts.gathers_hidden),
             std::min(least.reductions, counts.reductions),
             std::min(least.reductions_hidden, counts.reductions_hidden)};
    most = {std::max(most.gathers, counts.gathers), std::max(most.gathers_hidden, counts.gathers_hidden),
            std::max(most.reductions, counts.reductions), std::max(most.reductions_hidden, counts.reductions_hidden)};
  }
  const auto per_step = [&](trace::Nanoseconds total) {
    return static_cast<double>(total) * 1e-3 / (command.steps + 1);
  };
  if (world.rank() != Rank(0)) return 0;
  const Counts expected = promised(command, least.gathers, least.reductions);
  const bool kept =
      least.gathers_hidden >= expected.gathers_hidden && least.reductions_hidden >= expected.reductions_hidden;
  const auto range = [](int a, int b) { return nlohmann::json::array({a, b}); };
  console::print(nlohmann::json{
      {"bench", "overlap"},
      {"shape", command.shape},
      {"strategy", command.strategy},
      {"ranks", command.ranks},
      {"microbatches", command.microbatches},
      {"prefetch", fmt::format("{} {}", command.prefetch, command.amount)},
      {"delay", command.delay},
      {"keep_last", command.keep_last},
      {"unified", command.unify},
      {"gather_multiprocessors", command.gather_multiprocessors},
      {"carve_out", command.carve_out},
      {"loopback", command.nccl ? "none: NCCL" : "link"},
      {"symmetric", command.symmetric},
      {"one_sided", command.one_sided},
      {"reducer", command.reducer},
      {"steps", command.steps},
      {"gathers", range(least.gathers, most.gathers)},
      {"gathers_hidden", range(least.gathers_hidden, most.gathers_hidden)},
      {"gathers_hidden_promised", expected.gathers_hidden},
      {"reductions", range(least.reductions, most.reductions)},
      {"reductions_hidden", range(least.reductions_hidden, most.reductions_hidden)},
      {"reductions_hidden_promised", expected.reductions_hidden},
      {"step_us", per_step(report.elapsed)},
      {"compute_us", per_step(report.compute)},
      {"communication_us", per_step(report.communication)},
      {"hidden_us", per_step(report.hidden)},
      {"exposed_us", per_step(report.exposed)},
      {"peak_gathered_units", context->counters().peak_gathered_units},
      {"gathered_peak_mib", static_cast<double>(context->memory_report().gathered_peak.value()) / (1 << 20)},
      {"kept", kept}}.dump());
  if (!command.trace.empty()) {
    std::map<int, std::string> streams{{0, "compute"}};
    for (const auto& span : spans) {
      if (span.stream != 0) streams.try_emplace(span.stream, trace::to_string(span.kind));
    }
    trace::write_chrome_trace(command.trace, spans, 0, streams);
  }
  return kept || command.nccl ? 0 : 1;
}

}  // namespace fsdp::app
