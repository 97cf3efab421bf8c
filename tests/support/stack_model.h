// Equal linear units under a root without weights, for schedules: every unit costs the same.
#pragma once

#include <ATen/ops/ones.h>
#include <torch/nn/modules/container/modulelist.h>

#include "fsdp/fsdp.h"

namespace fsdp::testing {

struct LayerImpl : torch::nn::Module {
  explicit LayerImpl(std::int64_t width, at::Device device = at::kMeta) {
    weight = register_parameter("weight", at::ones({width, width}, at::TensorOptions().device(device)));
  }
  at::Tensor forward(at::Tensor x) { return fsdp::linear(x, weight); }
  at::Tensor weight;
};
FSDP_MODULE(Layer);

struct StackImpl : torch::nn::Module {
  StackImpl(int depth, std::int64_t width, at::Device device = at::kMeta) {
    for (int i = 0; i < depth; ++i) layers->push_back(Layer(width, device));
    register_module("layers", layers);
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& layer : *layers) x = layer->as<fsdp::Hooked<LayerImpl>>()->forward(x);
    return x;
  }
  torch::nn::ModuleList layers;
};
FSDP_MODULE(Stack);

inline void shard_stack(FsdpContext& context, Stack& model, const UnitOptions& options) {
  for (auto& layer : *model->layers) context.fully_shard(layer, options);
  context.fully_shard(model, options);
}

}  // namespace fsdp::testing
