// A small model with everything that makes sharding uneven: odd sizes, a scalar, biases, both kinds of linear layer,
// weights owned by the root, nested units.
#pragma once

#include <ATen/ops/layer_norm.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/square.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>

#include <memory>
#include <vector>

#include "fsdp/module/call.h"
#include "fsdp/module/context.h"
#include "fsdp/module/hooked.h"
#include "fsdp/module/linear.h"

namespace fsdp::testing {

struct ToyBlockImpl : torch::nn::Module {
  ToyBlockImpl(std::int64_t width, std::int64_t hidden)
      : up(register_module("up", fsdp::nn::Linear(width, hidden))),
        down(register_module("down", torch::nn::Linear(hidden, width))) {
    gain = register_parameter("gain", at::ones({width}));
    scale = register_parameter("scale", at::ones({}) * 0.5);
  }
  at::Tensor forward(at::Tensor x) {
    auto y = at::layer_norm(x, {x.size(-1)}, gain);
    return x + down->forward(at::relu(up->forward(y))) * scale;
  }
  fsdp::nn::Linear up;
  torch::nn::Linear down;
  at::Tensor gain, scale;
};
FSDP_MODULE(ToyBlock);

struct ToyModelImpl : torch::nn::Module {
  ToyModelImpl(std::int64_t inputs, std::int64_t width, std::int64_t hidden, int depth)
      : entry(register_module("entry", torch::nn::Linear(inputs, width))),
        exit(register_module("exit", fsdp::nn::Linear(width, 3))) {
    for (int i = 0; i < depth; ++i) blocks->push_back(ToyBlock(width, hidden));
    register_module("blocks", blocks);
  }
  at::Tensor forward(at::Tensor x) {
    x = entry->forward(x);
    for (auto& block : *blocks) x = block->as<fsdp::Hooked<ToyBlockImpl>>()->forward(x);
    return exit->forward(x);
  }
  at::Tensor loss(at::Tensor x, at::Tensor target) { return at::mean(at::square(forward(x).to(at::kFloat) - target)); }

  torch::nn::Linear entry;
  torch::nn::ModuleList blocks;
  fsdp::nn::Linear exit;
};
FSDP_MODULE(ToyModel);

// Every block a unit, then the root.
inline void shard_toy_model(FsdpContext& context, ToyModel& model, const UnitOptions& options) {
  for (auto& block : *model->blocks) context.fully_shard(block, options);
  context.fully_shard(model, options);
}

}  // namespace fsdp::testing
