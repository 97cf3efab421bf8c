#include "models/layers.h"

#include <ATen/ops/embedding.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/rms_norm.h>

#include "fsdp/module/linear.h"

namespace fsdp::models {
namespace {

at::Tensor reserve(at::IntArrayRef sizes, c10::Device device) {
  return at::empty(sizes, at::TensorOptions().dtype(at::kFloat).device(device));
}

}  // namespace

ProjectionImpl::ProjectionImpl(std::int64_t in, std::int64_t out, c10::Device device) {
  weight_ = register_parameter("weight", reserve({out, in}, device));
}

at::Tensor ProjectionImpl::forward(const at::Tensor& x) const { return fsdp::linear(x, weight_); }

RmsNormImpl::RmsNormImpl(std::int64_t width, double epsilon, c10::Device device) : epsilon_(epsilon) {
  weight_ = register_parameter("weight", reserve({width}, device));
}

at::Tensor RmsNormImpl::forward(const at::Tensor& x) const {
  return at::rms_norm(x, weight_.sizes(), weight_, epsilon_);
}

EmbeddingImpl::EmbeddingImpl(std::int64_t vocabulary, std::int64_t width, c10::Device device) {
  weight_ = register_parameter("weight", reserve({vocabulary, width}, device));
}

at::Tensor EmbeddingImpl::forward(const at::Tensor& tokens) const { return at::embedding(weight_, tokens); }

at::Tensor EmbeddingImpl::logits(const at::Tensor& x) const { return fsdp::linear(x, weight_); }

}  // namespace fsdp::models
