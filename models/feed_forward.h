// SwiGLU feed-forward (Shazeer, arXiv 2002.05202): down(silu(gate(x)) * up(x)).
#pragma once

#include "models/layers.h"
#include "models/transformer_config.h"

namespace fsdp::models {

class FeedForwardImpl : public torch::nn::Module {
 public:
  explicit FeedForwardImpl(const TransformerConfig& config);
  at::Tensor forward(const at::Tensor& x) const;

 private:
  Projection gate_{nullptr}, up_{nullptr}, down_{nullptr};
};
TORCH_MODULE(FeedForward);

}  // namespace fsdp::models
