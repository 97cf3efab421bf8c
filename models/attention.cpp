#include "models/attention.h"

#include <ATen/ops/scaled_dot_product_attention.h>

#include <utility>

namespace fsdp::models {
namespace {

// (batch, position, kv_head, head_width) -> (batch, head, position, head_width), each kv head `repeats` times in a row.
at::Tensor repeat_heads(const at::Tensor& x, std::int64_t repeats) {
  if (repeats == 1) return x.transpose(1, 2);
  const auto b = x.size(0), t = x.size(1), h = x.size(2), d = x.size(3);
  return x.unsqueeze(3).expand({b, t, h, repeats, d}).reshape({b, t, h * repeats, d}).transpose(1, 2);
}

}  // namespace

AttentionImpl::AttentionImpl(const TransformerConfig& config, std::shared_ptr<RotaryTable> rotary)
    : heads_(config.heads), kv_heads_(config.kv_heads), head_width_(config.head_width()), rotary_(std::move(rotary)) {
  query_ = register_module("query", Projection(config.width, heads_ * head_width_, config.device));
  key_ = register_module("key", Projection(config.width, kv_heads_ * head_width_, config.device));
  value_ = register_module("value", Projection(config.width, kv_heads_ * head_width_, config.device));
  output_ = register_module("output", Projection(heads_ * head_width_, config.width, config.device));
}

at::Tensor AttentionImpl::forward(const at::Tensor& x) const {
  const auto batch = x.size(0), positions = x.size(1);
  const auto query = rotary_->rotate(query_->forward(x).view({batch, positions, heads_, head_width_}));
  const auto key = rotary_->rotate(key_->forward(x).view({batch, positions, kv_heads_, head_width_}));
  const auto value = value_->forward(x).view({batch, positions, kv_heads_, head_width_});
  // CUDA's kernels read each key and value head as often as they need it; elsewhere it is repeated.
  const bool grouped = x.is_cuda() && heads_ != kv_heads_;
  const auto repeats = grouped ? 1 : heads_ / kv_heads_;
  const auto attended =
      at::scaled_dot_product_attention(query.transpose(1, 2), repeat_heads(key, repeats), repeat_heads(value, repeats),
                                       /*attn_mask=*/{}, /*dropout_p=*/0.0, /*is_causal=*/true, /*scale=*/{}, grouped);
  return output_->forward(attended.transpose(1, 2).reshape({batch, positions, heads_ * head_width_}));
}

}  // namespace fsdp::models
