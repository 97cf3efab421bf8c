#include "apps/fsdp/trained_model.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>

#include <utility>

#include "apps/fsdp/config_check.h"
#include "apps/fsdp/settings.h"
#include "fsdp/data/token_batch.h"
#include "fsdp/module/call.h"
#include "fsdp/pipeline/step_driver.h"
#include "models/moe_transformer.h"
#include "models/transformer.h"

namespace fsdp::app {
namespace {

at::Tensor plus(const at::Tensor& sum, const at::Tensor& value) { return sum.defined() ? sum + value : value; }

class DenseModel final : public TrainedModel {
 public:
  DenseModel(const World& world, const TrainConfig& config)
      : model_(on_meta(config.model.shape)),
        context_(FsdpContext::create(DeviceMesh(world, mesh_axes(config)), context_options(config))) {
    models::shard_transformer(*context_, model_, unit_options(config));
    const auto init = [&](const std::string& name, at::Tensor& whole, at::Generator& generator) {
      models::initialize_transformer(config.model.shape, name, whole, generator);
    };
    context_->materialize(init, {.seed = static_cast<std::uint64_t>(config.run.seed)});
  }

  [[nodiscard]] const std::shared_ptr<FsdpContext>& context() const override { return context_; }

  at::Tensor forward_backward(const std::vector<BatchTensors>& batches, const at::Tensor& scale) override {
    const auto microbatches = static_cast<double>(batches.size());
    at::Tensor sum;
    for (std::size_t micro = 0; micro < batches.size(); ++micro) {
      const auto& batch = batches[micro];
      auto scope = context_->microbatch({.is_last = micro + 1 == batches.size()});
      if (scale.defined()) {
        const auto loss = call(model_, &models::TransformerImpl::loss_sum, batch.tokens, batch.targets) * scale;
        loss.backward();
        sum = plus(sum, loss.detach().to(at::kDouble) * microbatches);
      } else {
        // They hold equally many, so the mean of their means is the mean over the global batch.
        const auto loss = call(model_, &models::TransformerImpl::loss, batch.tokens, batch.targets);
        (batches.size() == 1 ? loss : loss / microbatches).backward();
        sum = plus(sum, loss.detach().to(at::kDouble));
      }
    }
    return sum;
  }

  at::Tensor loss_sum(const BatchTensors& batch) override {
    at::NoGradGuard no_grad;
    return call(model_, &models::TransformerImpl::loss_sum, batch.tokens, batch.targets);
  }
  at::Tensor logits(const at::Tensor& tokens) override {
    at::NoGradGuard no_grad;
    return model_->forward(tokens);
  }

 private:
  static models::TransformerConfig on_meta(models::TransformerConfig shape) {
    shape.device = c10::kMeta;
    return shape;
  }

  models::Transformer model_;
  std::shared_ptr<FsdpContext> context_;
};

class MixtureModel final : public TrainedModel {
 public:
  MixtureModel(const World& world, const TrainConfig& config) {
    const DeviceMesh mesh(world, mesh_axes(config));
    model_ = std::make_shared<models::MoeTransformer>(moe_config(config), mesh);
    context_ = FsdpContext::create(mesh, context_options(config));
    model_->shard(*context_, unit_options(config));
    context_->materialize(model_->initializer(), {.seed = static_cast<std::uint64_t>(config.run.seed)});
    const auto& parallel = config.parallel;
    const auto schedule =
        parallel.schedule == "sequential" ? pipeline::Schedule::sequential : pipeline::Schedule::one_f_one_b;
    driver_ = std::make_unique<pipeline::StepDriver>(
        context_, model_,
        pipeline::StepOptions{
            .schedule = schedule,
            .delay_weights = parallel.delay_weight_gradients,
            .release_early = parallel.release_early,
            .gather_ahead = parallel.prefetch == "none" ? 0 : static_cast<int>(parallel.prefetch_amount)});
  }

  [[nodiscard]] const std::shared_ptr<FsdpContext>& context() const override { return context_; }

  at::Tensor forward_backward(const std::vector<BatchTensors>& batches, const at::Tensor&) override {
    std::vector<pipeline::Microbatch> microbatches;
    for (const auto& batch : batches) microbatches.push_back({{batch.tokens}, {batch.targets}});
    at::Tensor sum;
    for (const auto& loss : driver_->run(std::move(microbatches))) sum = plus(sum, loss.to(at::kDouble));
    return sum;
  }
  [[nodiscard]] std::vector<std::pair<std::string, at::Tensor>> extra_state() override {
    std::vector<std::pair<std::string, at::Tensor>> biases;
    for (std::size_t layer = 0; layer < model_->blocks().size(); ++layer) {
      const auto& bias = model_->blocks()[layer]->expert_bias;
      if (bias.defined()) biases.emplace_back("blocks." + std::to_string(layer) + ".expert_bias", bias);
    }
    return biases;
  }
  void after_step() override { model_->update_expert_biases(); }
  at::Tensor loss_sum(const BatchTensors& batch) override {
    const auto mean = driver_->evaluate({{batch.tokens}, {batch.targets}});
    return mean * (batch.targets != data::kIgnoredTarget).sum();
  }
  at::Tensor logits(const at::Tensor& tokens) override { return driver_->predict({tokens})[0]; }

 private:
  std::shared_ptr<models::MoeTransformer> model_;
  std::shared_ptr<FsdpContext> context_;
  std::unique_ptr<pipeline::StepDriver> driver_;
};

}  // namespace

std::unique_ptr<TrainedModel> make_trained_model(const World& world, const TrainConfig& config) {
  if (config.model.moe.experts > 0) return std::make_unique<MixtureModel>(world, config);
  return std::make_unique<DenseModel>(world, config);
}

}  // namespace fsdp::app
