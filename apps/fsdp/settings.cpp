#include "apps/fsdp/settings.h"

#include "apps/fsdp/config_check.h"
#include "fsdp/base/check.h"

namespace fsdp::app {
namespace {

Strategy strategy(const TrainConfig& config) {
  std::vector<std::string> axes;
  for (const auto& axis : mesh_axes(config)) axes.push_back(axis.name);
  const auto& name = config.parallel.strategy;
  if (name == "ddp") return ddp(axes);
  if (name == "zero1") return zero1(axes);
  if (name == "zero2") return zero2(axes);
  if (name == "zero3") return zero3(axes);
  if (name == "hsdp") return hsdp(axes.at(0), axes.at(1));
  FSDP_INVARIANT(name == "hfsdp");
  return hfsdp(axes.at(0), axes.at(1));
}

Prefetch prefetch(const ParallelConfig& parallel) {
  const int amount = static_cast<int>(parallel.prefetch_amount);
  if (parallel.prefetch == "none") return Prefetch::none();
  if (parallel.prefetch == "recorded") return Prefetch::recorded(amount);
  if (parallel.prefetch == "delayed_release") return Prefetch::delayed_release(amount);
  FSDP_INVARIANT(parallel.prefetch == "depth");
  return Prefetch::depth(amount);
}

c10::ScalarType dtype(const std::string& name) { return name == "bf16" ? c10::kBFloat16 : c10::kFloat; }

}  // namespace

DeviceKind device_kind(const TrainConfig& config) {
  return config.run.device == "cpu"    ? DeviceKind::cpu
         : config.run.device == "cuda" ? DeviceKind::cuda
                                       : DeviceKind::automatic;
}

ContextOptions context_options(const TrainConfig& config) {
  const auto& parallel = config.parallel;
  ContextOptions options;
  options.prefetch = prefetch(parallel);
  options.reduction = Reduction{static_cast<int>(parallel.reduction_delay)};
  options.reduce =
      parallel.reduce == "last_microbatch" ? ReducePolicy::last_microbatch : ReducePolicy::every_microbatch;
  options.keep_last = parallel.keep_last;
  options.keep_first = parallel.keep_first;
  options.unify_communication_stream = parallel.unify_communication_stream;
  return options;
}

UnitOptions unit_options(const TrainConfig& config) {
  const auto& parallel = config.parallel;
  UnitOptions options;
  options.placements = strategy(config);
  options.mixed_precision.param_dtype = dtype(parallel.param_dtype);
  options.mixed_precision.reduce_dtype = dtype(parallel.reduce_dtype);
  options.mixed_precision.main_param_dtype = c10::kFloat;
  if (parallel.reshard == "after_forward") options.reshard = Reshard::after_forward;
  if (parallel.reshard == "never") options.reshard = Reshard::never;
  return options;
}

LearningRateSchedule learning_rate_schedule(const TrainConfig& config) {
  const auto& optimizer = config.optimizer;
  return {.peak = optimizer.learning_rate,
          .final_fraction = optimizer.final_fraction,
          .warmup_steps = optimizer.warmup_steps,
          .total_steps = config.run.steps,
          .decay = optimizer.decay == "cosine"   ? Decay::cosine
                   : optimizer.decay == "linear" ? Decay::linear
                                                 : Decay::constant};
}

}  // namespace fsdp::app
