#include "models/transformer.h"

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cross_entropy_loss.h>

#include <torch/nn/modules/container/modulelist.h>

#include <cmath>

#include "fsdp/base/check.h"
#include "fsdp/module/linear_cross_entropy.h"
#include "fsdp/module/recompute.h"

namespace fsdp::models {

TransformerBlockImpl::TransformerBlockImpl(const TransformerConfig& config,
                                           const std::shared_ptr<RotaryTable>& rotary) {
  attention_norm_ = register_module("attention_norm", RmsNorm(config.width, config.norm_epsilon, config.device));
  attention_ = register_module("attention", Attention(config, rotary));
  feed_forward_norm_ = register_module("feed_forward_norm", RmsNorm(config.width, config.norm_epsilon, config.device));
  feed_forward_ = register_module("feed_forward", FeedForward(config));
}

at::Tensor TransformerBlockImpl::forward(const at::Tensor& x) const {
  const auto hidden = x + attention_->forward(attention_norm_->forward(x));
  return hidden + feed_forward_->forward(feed_forward_norm_->forward(hidden));
}

TransformerImpl::TransformerImpl(const TransformerConfig& config) : config_(config) {
  config_.validate();
  embedding_ = register_module("embedding", Embedding(config_.vocabulary, config_.width, config_.device));
  const auto rotary = std::make_shared<RotaryTable>(config_.head_width(), config_.rope_theta);
  const auto list = register_module("blocks", torch::nn::ModuleList());
  for (std::int64_t layer = 0; layer < config_.layers; ++layer) {
    blocks_.emplace_back(config_, rotary);
    list->push_back(blocks_.back());
  }
  norm_ = register_module("norm", RmsNorm(config_.width, config_.norm_epsilon, config_.device));
  if (!config_.tied_embeddings)
    head_ = register_module("head", Projection(config_.width, config_.vocabulary, config_.device));
  if (config_.device.is_meta()) return;
  auto generator = at::globalContext().defaultGenerator(config_.device);
  for (auto& parameter : named_parameters())
    initialize_transformer(config_, parameter.key(), parameter.value(), generator);
}

at::Tensor TransformerImpl::hidden(const at::Tensor& tokens) {
  FSDP_CHECK(tokens.dim() == 2, UsageError,
             "transformer: expected tokens of shape (batch, position), got {} dimensions", tokens.dim());
  FSDP_CHECK(tokens.size(1) <= config_.max_context, UsageError,
             "transformer: expected at most max_context = {} positions, got {}", config_.max_context, tokens.size(1));
  auto hidden = embedding_->forward(tokens);
  for (auto& block : blocks_) {
    hidden = config_.recompute ? recompute([block](const at::Tensor& x) mutable { return block->forward(x); }, hidden)
                               : block->forward(hidden);
  }
  return norm_->forward(hidden);
}

at::Tensor TransformerImpl::forward(const at::Tensor& tokens) {
  const auto hidden = this->hidden(tokens);
  return config_.tied_embeddings ? embedding_->logits(hidden) : head_->forward(hidden);
}

at::Tensor TransformerImpl::cross_entropy(const at::Tensor& tokens, const at::Tensor& targets,
                                          at::Reduction::Reduction reduction) {
  if (tokens.is_cuda()) {
    const auto& weight = config_.tied_embeddings ? embedding_->weight() : head_->weight();
    return linear_cross_entropy(hidden(tokens), weight, targets, {.reduction = reduction});
  }
  const auto logits = forward(tokens);
  return at::cross_entropy_loss(logits.reshape({-1, config_.vocabulary}).to(at::kFloat), targets.reshape({-1}), {},
                                reduction);
}

at::Tensor TransformerImpl::loss(const at::Tensor& tokens, const at::Tensor& targets) {
  return cross_entropy(tokens, targets, at::Reduction::Mean);
}

at::Tensor TransformerImpl::loss_sum(const at::Tensor& tokens, const at::Tensor& targets) {
  return cross_entropy(tokens, targets, at::Reduction::Sum);
}

void initialize_transformer(const TransformerConfig& config, const std::string& name, at::Tensor& whole,
                            at::Generator& generator) {
  at::NoGradGuard no_grad;
  if (whole.dim() == 1) {
    whole.fill_(1.0);
    return;
  }
  const bool residual = name.ends_with("attention.output.weight") || name.ends_with("feed_forward.down.weight");
  const double deviation = 0.02 / (residual ? std::sqrt(2.0 * static_cast<double>(config.layers)) : 1.0);
  whole.normal_(0.0, deviation, generator);
}

void shard_transformer(FsdpContext& context, const Transformer& model, const UnitOptions& options) {
  for (const auto& block : model->blocks()) context.fully_shard(block, options);
  context.fully_shard(model, options);
}

}  // namespace fsdp::models
