#include "apps/fsdp/bench_train.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "apps/fsdp/console.h"
#include "fsdp/base/check.h"
#include "fsdp/mesh/all_hosts.h"
#include "fsdp/mesh/cuda_world.h"
#include "fsdp/mesh/device_mesh.h"
#include "fsdp/mesh/spawn_ranks.h"
#include "fsdp/module/call.h"
#include "fsdp/optim/adamw.h"
#include "fsdp/optim/clip_grad_norm.h"
#include "models/presets.h"
#include "models/transformer.h"

namespace fsdp::app {
namespace {

constexpr double kPeakFlops = 989e12;
constexpr double kClip = 1.0, kRate = 1e-4, kBeta1 = 0.9, kBeta2 = 0.95, kDecay = 0.1;

using Clock = std::chrono::steady_clock;

struct Batch {
  at::Tensor tokens, targets;
};

class TrainMode {
 public:
  virtual ~TrainMode() = default;
  virtual at::Tensor step(const Batch& batch) = 0;  // enqueues it; the loss
  std::optional<FsdpContext::CapturedStep> captured;
};

class Sharded final : public TrainMode {
 public:
  Sharded(const World& world, models::TransformerConfig config) {
    config.device = c10::kMeta;
    model_ = models::Transformer(config);
    context = FsdpContext::create(DeviceMesh(world, {{"dp", world.size()}}));
    UnitOptions unit;
    unit.mixed_precision.param_dtype = c10::kBFloat16;
    unit.mixed_precision.reduce_dtype = c10::kFloat;
    unit.mixed_precision.main_param_dtype = c10::kFloat;
    models::shard_transformer(*context, model_, unit);
    context->materialize([&](const std::string& name, at::Tensor& whole, at::Generator& generator) {
      models::initialize_transformer(config, name, whole, generator);
    });
    optimizer_ = std::make_unique<AdamW>(
        *context, AdamWOptions{.learning_rate = kRate, .beta1 = kBeta1, .beta2 = kBeta2, .weight_decay = kDecay});
  }
  at::Tensor step(const Batch& batch) override {
    const auto loss = call(model_, &models::TransformerImpl::loss, batch.tokens, batch.targets);
    loss.backward();
    optimizer_->step(grad_norm(*context), kClip);
    optimizer_->zero_grad();
    return loss.detach();
  }
  std::shared_ptr<FsdpContext> context;

 private:
  models::Transformer model_{nullptr};
  std::unique_ptr<AdamW> optimizer_;
};

class Bare final : public TrainMode {
 public:
  Bare(c10::Device device, models::TransformerConfig config) {
    config.device = device;
    model_ = models::Transformer(config);
    at::NoGradGuard no_grad;
    for (auto& p : model_->parameters()) main_.push_back(p.detach().clone());
    model_->to(c10::kBFloat16);
    weights_ = model_->parameters();
    for (const auto& w : main_) {
      gradients_.push_back(at::zeros_like(w));
      first_.push_back(at::zeros_like(w));
      second_.push_back(at::zeros_like(w));
      steps_.push_back(at::zeros({}, w.options()));
    }
  }
  at::Tensor step(const Batch& batch) override {
    const auto loss = model_->loss(batch.tokens, batch.targets);
    loss.backward();
    at::NoGradGuard no_grad;
    std::vector<at::Tensor> low;
    for (auto& w : weights_) low.push_back(w.grad());
    at::_foreach_copy_(gradients_, low);
    for (auto& w : weights_) w.mutable_grad().reset();
    low.clear();
    const auto norm = at::stack(at::_foreach_norm(gradients_, 2)).square().sum().sqrt();
    at::_foreach_mul_(gradients_, ((norm + 1e-6).reciprocal() * kClip).clamp_max(1.0));
    at::_foreach_add_(steps_, 1);
    at::_fused_adamw_(main_, gradients_, first_, second_, {}, steps_, kRate, kBeta1, kBeta2, kDecay, 1e-8, false, false,
                      {}, {});
    at::_foreach_copy_(weights_, main_);
    return loss.detach();
  }

 private:
  models::Transformer model_{nullptr};
  std::vector<at::Tensor> weights_, main_, gradients_, first_, second_, steps_;
};

}  // namespace

int bench_train(const BenchTrainCommand& command) {
  FSDP_CHECK(models::find_moe_preset(command.preset).value_or(models::MoeConfig{}).experts == 0, UsageError,
             "--preset: {} is a mixture of experts; this benchmark runs dense models", command.preset);
  auto config = models::find_preset(command.preset);
  FSDP_CHECK(config.has_value(), UsageError, "--preset: there is no preset \"{}\"", command.preset);
  config->max_context = std::max(config->max_context, command.context);
  if (command.nccl) {
    static_cast<void>(uses_cuda(DeviceKind::cuda));  // says once why it cannot be
    if (const auto code = spawn_ranks(command.ranks)) return *code;
  }
  const World world = command.nccl        ? World::from_environment({.device = DeviceKind::cuda})
                      : command.ranks > 1 ? World::loopback({.size = command.ranks})
                                          : World::single({.device = DeviceKind::cuda});
  const auto hosts = command.nccl ? all_hosts(world, "bench") : Communicator();
  Runtime& runtime = *world.runtime();
  const auto options = at::TensorOptions().dtype(at::kLong).device(runtime.device());
  const Batch batch{at::randint(config->vocabulary, {command.sequences, command.context}, options),
                    at::randint(config->vocabulary, {command.sequences, command.context}, options)};
  const auto wait = [&] { runtime.compute_stream().synchronize(); };
  struct Mode {
    std::unique_ptr<TrainMode> mode;
    std::vector<double> times;
    double loss = 0, peak_gib = 0;
  };
  std::map<std::string, Mode> modes;
  for (const auto& name : command.modes) {
    FSDP_CHECK(name == "bare" || name == "sharded" || name == "sharded+graph", UsageError,
               "--modes: expected bare, sharded or sharded+graph, got \"{}\"", name);
    Mode& mode = modes[name];
    const auto before = runtime.device_memory().in_use;
    if (name == "bare")
      mode.mode = std::make_unique<Bare>(runtime.device(), *config);
    else
      mode.mode = std::make_unique<Sharded>(world, *config);
    for (int i = 0; i < 3; ++i) static_cast<void>(mode.mode->step(batch));
    wait();
    runtime.reset_device_peak();
    static_cast<void>(mode.mode->step(batch));
    wait();
    mode.peak_gib = static_cast<double>((runtime.device_memory().peak - before).value()) / (1 << 30);
    if (name == "sharded+graph") {
      auto& sharded = static_cast<Sharded&>(*mode.mode);
      mode.mode->captured.emplace(sharded.context->capture([&] { return sharded.step(batch); }));
    }
  }
  for (int round = 0; round < command.rounds; ++round) {
    for (const auto& name : command.modes) {
      Mode& mode = modes[name];
      wait();
      if (command.nccl) hosts.barrier(world.host().runtime()->compute_stream(), "bench");
      const auto start = Clock::now();
      const auto loss = mode.mode->captured ? mode.mode->captured->replay() : mode.mode->step(batch);
      mode.loss = loss.item<double>();  // read each step, as training does
      wait();
      mode.times.push_back(std::chrono::duration<double, std::milli>(Clock::now() - start).count());
    }
  }
  if (world.rank() != Rank(0)) return 0;
  const double tokens = static_cast<double>(command.sequences * command.context);
  // Six a weight and token, of products; attention's two products over half the positions, forward and twice backward.
  const double matrix_weights = static_cast<double>(config->parameter_count() -
                                                    (config->tied_embeddings ? 0 : config->vocabulary * config->width));
  const double flops =
      tokens * (6 * matrix_weights + 6.0 * static_cast<double>(config->layers * config->width * command.context));
  for (const auto& name : command.modes) {
    auto& times = modes[name].times;
    std::nth_element(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2), times.end());
    const double ms = times[times.size() / 2];
    console::print(nlohmann::json{{"bench", "train"},
                                  {"preset", command.preset},
                                  {"mode", name},
                                  {"ranks", command.ranks},
                                  {"loopback", command.nccl        ? "none: NCCL"
                                               : command.ranks > 1 ? "copy"
                                                                   : "none"},
                                  {"sequences", command.sequences},
                                  {"context", command.context},
                                  {"step_ms", ms},
                                  {"tokens_per_second", tokens / ms * 1000},
                                  {"model_flop_utilisation", flops / (ms * 1e-3) / kPeakFlops},
                                  {"loss", modes[name].loss},
                                  {"peak_gib", modes[name].peak_gib},
                                  {"rounds", command.rounds}}
                       .dump());
  }
  return 0;
}

}  // namespace fsdp::app
