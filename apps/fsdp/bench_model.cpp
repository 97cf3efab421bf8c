#include "apps/fsdp/bench_model.h"

#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/silu.h>

#include <cmath>
#include <cstdio>

#include "fsdp/base/check.h"
#include "fsdp/module/linear.h"

namespace fsdp::app {
namespace {

constexpr std::int64_t kHeadWidth = 128;

const std::vector<BenchShape>& shapes() {
  static const std::vector<BenchShape> all{{"A", 8, 4096, 4096, 11008},  {"B", 32, 2048, 2048, 5504},
                                           {"C", 64, 1024, 512, 2752},   {"D", 32, 4096, 4096, 11008},
                                           {"E", 32, 4096, 8192, 14336}, {"tiny", 4, 256, 128, 512}};
  return all;
}

at::TensorOptions low(c10::Device device) { return at::TensorOptions().dtype(at::kBFloat16).device(device); }

at::Tensor matrix(std::int64_t rows, std::int64_t columns, c10::Device device) {
  return at::randn({rows, columns}, low(device)).mul_(0.5 / std::sqrt(static_cast<double>(columns)));
}

}  // namespace

std::int64_t BenchShape::parameters() const {
  return layers * (ffn == 0 ? width * width : 4 * width * width + 3 * width * ffn + 2 * width);
}

BenchShape bench_shape(const std::string& text) {
  std::string names;
  for (const auto& shape : shapes()) {
    if (shape.name == text) return shape;
    names += (names.empty() ? "" : ", ") + shape.name;
  }
  long long layers = 0, width = 0, tokens = 0, ffn = 0;
  const int read = std::sscanf(text.c_str(), "%lld,%lld,%lld,%lld", &layers, &width, &tokens, &ffn);
  FSDP_CHECK(read == 4 && layers > 0 && width >= kHeadWidth && width % kHeadWidth == 0 && tokens > 0 && ffn >= 0,
             UsageError,
             "the shape \"{}\": expected one of {}, or layers,width,tokens,ffn with a width in multiples of {} (ffn 0: "
             "linear layers)",
             text, names, kHeadWidth);
  return {text, layers, width, tokens, ffn};
}

BenchBlockImpl::BenchBlockImpl(const BenchShape& shape, bool own_linear, c10::Device device)
    : own_linear_(own_linear), heads_(shape.width / kHeadWidth) {
  const auto d = shape.width, f = shape.ffn;
  norm1_ = register_parameter("norm1", at::ones({d}, low(device)));
  qkv_ = register_parameter("qkv", matrix(3 * d, d, device));
  out_ = register_parameter("out", matrix(d, d, device));
  norm2_ = register_parameter("norm2", at::ones({d}, low(device)));
  gate_ = register_parameter("gate", matrix(f, d, device));
  up_ = register_parameter("up", matrix(f, d, device));
  down_ = register_parameter("down", matrix(d, f, device));
}

at::Tensor BenchBlockImpl::project(const at::Tensor& x, const at::Tensor& weight) const {
  return own_linear_ ? fsdp::linear(x, weight) : at::linear(x, weight);
}

at::Tensor BenchBlockImpl::forward(const at::Tensor& x) {
  const auto b = x.size(0), t = x.size(1), d = x.size(2);
  const auto parts = project(at::rms_norm(x, {d}, norm1_, 1e-6), qkv_)
                         .view({b, t, 3, heads_, d / heads_})
                         .permute({2, 0, 3, 1, 4})
                         .unbind(0);
  const auto attended = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, true);
  const auto hidden = x + project(attended.transpose(1, 2).reshape({b, t, d}), out_);
  const auto h = at::rms_norm(hidden, {d}, norm2_, 1e-6);
  return hidden + project(at::silu(project(h, gate_)) * project(h, up_), down_);
}

BenchLinearImpl::BenchLinearImpl(const BenchShape& shape, bool own_linear, c10::Device device)
    : own_linear_(own_linear) {
  weight_ = register_parameter("weight", matrix(shape.width, shape.width, device));
}

at::Tensor BenchLinearImpl::forward(const at::Tensor& x) {
  return at::relu(own_linear_ ? fsdp::linear(x, weight_) : at::linear(x, weight_));
}

BenchStackImpl::BenchStackImpl(const BenchShape& shape, bool own_linear, c10::Device device) {
  for (std::int64_t i = 0; i < shape.layers; ++i) {
    const auto name = "layer" + std::to_string(i);
    if (shape.ffn == 0)
      register_module(name, linears.emplace_back(shape, own_linear, device));
    else
      register_module(name, blocks.emplace_back(shape, own_linear, device));
  }
}

at::Tensor BenchStackImpl::forward(at::Tensor x) {
  for (std::size_t i = 0; i < blocks.size() + linears.size(); ++i) {
    if (before_layer) x = before_layer(i, x);
    x = linears.empty() ? blocks[i]->forward(x) : linears[i]->forward(x);
  }
  return x;
}

void shard_bench_stack(FsdpContext& context, BenchStack& model, const UnitOptions& options) {
  for (auto& block : model->blocks) context.fully_shard(block, options);
  for (auto& linear : model->linears) context.fully_shard(linear, options);
  context.fully_shard(model, options);
  context.finalize();
}

at::Tensor bench_input(const BenchShape& shape, c10::Device device) {
  return at::randn({1, shape.tokens, shape.width}, low(device)).set_requires_grad(true);
}

}  // namespace fsdp::app
