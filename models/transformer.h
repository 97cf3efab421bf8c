// A decoder transformer as in Llama 3: a user of the library like any other.
//
//   Transformer model(config);                                    // config.device may be meta
//   shard_transformer(*context, model, {.placements = fsdp::zero3("dp")});
//   context->materialize([&](auto& name, auto& whole, auto& generator) { initialize_transformer(config, name, whole,
//   generator); }); fsdp::call(model, &TransformerImpl::loss, tokens, targets).backward();
//
// Nothing reads tensor data on the host, so the model also runs on meta tensors.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Reduction.h>
#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "fsdp/module/context.h"
#include "fsdp/module/hooked.h"
#include "models/attention.h"
#include "models/feed_forward.h"
#include "models/layers.h"
#include "models/transformer_config.h"

namespace fsdp::models {

class TransformerBlockImpl : public torch::nn::Module {
 public:
  TransformerBlockImpl(const TransformerConfig& config, const std::shared_ptr<RotaryTable>& rotary);
  // x: (batch, position, width)
  at::Tensor forward(const at::Tensor& x) const;

 private:
  RmsNorm attention_norm_{nullptr}, feed_forward_norm_{nullptr};
  Attention attention_{nullptr};
  FeedForward feed_forward_{nullptr};
};
FSDP_MODULE(TransformerBlock);

class TransformerImpl : public torch::nn::Module {
 public:
  // Weights on a real device are initialised from its default generator. Throws UsageError for an impossible shape.
  explicit TransformerImpl(const TransformerConfig& config);

  // tokens: int64 (batch, position) -> logits (batch, position, vocabulary)
  at::Tensor forward(const at::Tensor& tokens);
  // Cross entropy in fp32, on a GPU without all logits at once, mean or sum over the targets; targets as tokens, -100
  // counts for nothing.
  at::Tensor loss(const at::Tensor& tokens, const at::Tensor& targets);
  at::Tensor loss_sum(const at::Tensor& tokens, const at::Tensor& targets);

  [[nodiscard]] const TransformerConfig& config() const { return config_; }
  [[nodiscard]] const std::vector<TransformerBlock>& blocks() const { return blocks_; }

 private:
  at::Tensor hidden(const at::Tensor& tokens);  // what the output head sees
  at::Tensor cross_entropy(const at::Tensor& tokens, const at::Tensor& targets, at::Reduction::Reduction reduction);

  TransformerConfig config_;
  Embedding embedding_{nullptr};
  std::vector<TransformerBlock> blocks_;
  RmsNorm norm_{nullptr};
  Projection head_{nullptr};  // empty with tied embeddings
};
FSDP_MODULE(Transformer);

// Values of one whole parameter: norms one, matrices normal with deviation 0.02, those that write to the residual
// stream scaled by 1 / sqrt(2 * layers). Usable as fsdp::InitFunction.
void initialize_transformer(const TransformerConfig& config, const std::string& name, at::Tensor& whole,
                            at::Generator& generator);

// Each block becomes a unit; embedding, last norm and head become the root's.
void shard_transformer(FsdpContext& context, const Transformer& model, const UnitOptions& options);

}  // namespace fsdp::models
