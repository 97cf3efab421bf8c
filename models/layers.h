// The small layers of the transformer. Unlike those of torch::nn they only reserve their weight, on any device (meta
// included); initialize_transformer gives it values.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>

namespace fsdp::models {

// x (..., in) times weight (out, in) transposed, through fsdp::linear.
class ProjectionImpl : public torch::nn::Module {
 public:
  ProjectionImpl(std::int64_t in, std::int64_t out, c10::Device device);
  at::Tensor forward(const at::Tensor& x) const;
  [[nodiscard]] const at::Tensor& weight() const { return weight_; }

 private:
  at::Tensor weight_;
};
TORCH_MODULE(Projection);

// x / sqrt(mean(x^2) + epsilon) * weight over the last dimension.
class RmsNormImpl : public torch::nn::Module {
 public:
  RmsNormImpl(std::int64_t width, double epsilon, c10::Device device);
  at::Tensor forward(const at::Tensor& x) const;

 private:
  at::Tensor weight_;
  double epsilon_;
};
TORCH_MODULE(RmsNorm);

class EmbeddingImpl : public torch::nn::Module {
 public:
  EmbeddingImpl(std::int64_t vocabulary, std::int64_t width, c10::Device device);
  at::Tensor forward(const at::Tensor& tokens) const;
  // The same weight as output head: x (..., width) -> (..., vocabulary).
  at::Tensor logits(const at::Tensor& x) const;
  [[nodiscard]] const at::Tensor& weight() const { return weight_; }

 private:
  at::Tensor weight_;
};
TORCH_MODULE(Embedding);

}  // namespace fsdp::models
