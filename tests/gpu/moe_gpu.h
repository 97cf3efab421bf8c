// A small mixture of experts for GPU tests.
#pragma once

#include <ATen/ops/randint.h>

#include "fsdp/pipeline/step_driver.h"
#include "models/moe_transformer.h"
#include "tests/gpu/gpu.h"

namespace fsdp::testing {

// The same values on every kind of device, for a rank whose first expert is `first_expert`.
inline InitFunction moe_values(std::int64_t first_expert) {
  return [first_expert](const std::string& name, at::Tensor& whole, at::Generator&) {
    auto values = at::empty(whole.sizes(), at::kFloat);
    std::uint64_t seed = 17;
    for (const char c : name) seed = seed * 31 + static_cast<unsigned char>(c);
    if (values.dim() == 3) {
      for (std::int64_t e = 0; e < values.size(0); ++e)
        values.select(0, e).copy_(
            random({values.size(1), values.size(2)}, seed + 1000 * static_cast<std::uint64_t>(first_expert + e)) *
            0.05);
    } else if (values.dim() == 2) {
      values.copy_(random(values.sizes(), seed) * 0.05);
    } else {
      values.fill_(1.0);
    }
    at::NoGradGuard no_grad;
    whole.copy_(values);
  };
}

struct MoeGpuRun {
  MoeGpuRun(World world, const DeviceMesh& mesh, const pipeline::StepOptions& options, UnitOptions unit = {},
            const models::MoeConfig& config = MoeGpuRun::config())
      : world(world),
        model(std::make_shared<models::MoeTransformer>(config, mesh)),
        context(FsdpContext::create(mesh)) {
    model->shard(*context, unit);
    context->materialize(moe_values(model->exchange()->first_own_expert()));
    driver = std::make_unique<pipeline::StepDriver>(context, model, options);
  }
  static models::MoeConfig config() {
    models::MoeConfig config;
    config.base = {
        .vocabulary = 96, .layers = 3, .width = 64, .heads = 2, .kv_heads = 1, .ffn_width = 96, .max_context = 64};
    config.experts = 8;
    config.top_k = 2;
    config.expert_width = 48;
    config.shared_width = 64;
    config.dense_layers = 1;
    return config;
  }
  std::vector<pipeline::Microbatch> batches(int count, std::uint64_t seed, std::int64_t rank = -1) const {
    std::vector<pipeline::Microbatch> all;
    const auto of = static_cast<std::uint64_t>(rank < 0 ? world.rank().value() : rank);
    for (int m = 0; m < count; ++m) {
      auto generator = at::detail::createCPUGenerator(10000 * seed + 100 * of + static_cast<std::uint64_t>(m));
      const auto tokens = at::randint(96, {2, 33}, generator, at::TensorOptions().dtype(at::kLong));
      const auto device = world.runtime()->device();
      all.push_back(
          {{tokens.narrow(1, 0, 32).contiguous().to(device)}, {tokens.narrow(1, 1, 32).contiguous().to(device)}});
    }
    return all;
  }
  std::vector<at::Tensor> weights() {
    std::vector<at::Tensor> all;
    for (auto& [name, leaf] : context->named_parameters()) all.push_back(context->full_parameter(name).to(at::kCPU));
    return all;
  }
  World world;
  std::shared_ptr<models::MoeTransformer> model;
  std::shared_ptr<FsdpContext> context;
  std::unique_ptr<pipeline::StepDriver> driver;
};

}  // namespace fsdp::testing
