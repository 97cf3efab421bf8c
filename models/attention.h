// Causal self-attention in which several query heads share one key and value head (grouped-query attention).
#pragma once

#include <memory>

#include "models/layers.h"
#include "models/rotary.h"
#include "models/transformer_config.h"

namespace fsdp::models {

class AttentionImpl : public torch::nn::Module {
 public:
  AttentionImpl(const TransformerConfig& config, std::shared_ptr<RotaryTable> rotary);
  // x: (batch, position, width)
  at::Tensor forward(const at::Tensor& x) const;

 private:
  std::int64_t heads_, kv_heads_, head_width_;
  std::shared_ptr<RotaryTable> rotary_;
  Projection query_{nullptr}, key_{nullptr}, value_{nullptr}, output_{nullptr};
};
TORCH_MODULE(Attention);

}  // namespace fsdp::models
