// What the benchmarks of `fsdp bench` run: blocks of a transformer without embedding, and stacks of linear layers.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <string>
#include <vector>

#include "fsdp/module/context.h"
#include "fsdp/module/hooked.h"

namespace fsdp::app {

// Sizes of a benchmark. With `ffn` 0 a unit is one linear layer of `width`.
struct BenchShape {
  std::string name;
  std::int64_t layers = 0, width = 0, tokens = 0, ffn = 0;
  [[nodiscard]] std::int64_t parameters() const;
};

// "A" to "E", or "layers,width,tokens,ffn". Throws UsageError naming those there are.
[[nodiscard]] BenchShape bench_shape(const std::string& text);

// RMSNorm, fused query, key and value, causal attention with heads of 128, output, RMSNorm, SwiGLU; no biases.
class BenchBlockImpl : public torch::nn::Module {
 public:
  // `own_linear`: fsdp::linear, else at::linear.
  BenchBlockImpl(const BenchShape& shape, bool own_linear, c10::Device device);
  at::Tensor forward(const at::Tensor& x);

 private:
  at::Tensor project(const at::Tensor& x, const at::Tensor& weight) const;
  bool own_linear_;
  std::int64_t heads_;
  at::Tensor norm1_, qkv_, out_, norm2_, gate_, up_, down_;
};
FSDP_MODULE(BenchBlock);

class BenchLinearImpl : public torch::nn::Module {
 public:
  BenchLinearImpl(const BenchShape& shape, bool own_linear, c10::Device device);
  at::Tensor forward(const at::Tensor& x);

 private:
  bool own_linear_;
  at::Tensor weight_;
};
FSDP_MODULE(BenchLinear);

class BenchStackImpl : public torch::nn::Module {
 public:
  BenchStackImpl(const BenchShape& shape, bool own_linear, c10::Device device);
  // Called before each layer's forward with its index, and with its input, when set.
  std::function<at::Tensor(std::size_t, const at::Tensor&)> before_layer;
  at::Tensor forward(at::Tensor x);

  std::vector<BenchBlock> blocks;  // or
  std::vector<BenchLinear> linears;
};
FSDP_MODULE(BenchStack);

// Every layer a unit, then the root.
void shard_bench_stack(FsdpContext& context, BenchStack& model, const UnitOptions& options);

// bf16, on the device; needs a gradient, as the input of a first block has one from its embedding.
[[nodiscard]] at::Tensor bench_input(const BenchShape& shape, c10::Device device);

}  // namespace fsdp::app
