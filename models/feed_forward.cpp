#include "models/feed_forward.h"

#include "models/swiglu.h"

namespace fsdp::models {

FeedForwardImpl::FeedForwardImpl(const TransformerConfig& config) {
  gate_ = register_module("gate", Projection(config.width, config.ffn_width, config.device));
  up_ = register_module("up", Projection(config.width, config.ffn_width, config.device));
  down_ = register_module("down", Projection(config.ffn_width, config.width, config.device));
}

at::Tensor FeedForwardImpl::forward(const at::Tensor& x) const {
  return down_->forward(swiglu(gate_->forward(x), up_->forward(x)));
}

}  // namespace fsdp::models
