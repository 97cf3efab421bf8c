// Which experts a token goes to. Plain tensor functions, differentiable.
#pragma once

#include <ATen/core/Tensor.h>

namespace fsdp::moe {

struct RouterOptions {
  std::int64_t experts = 8;
  std::int64_t top_k = 2;     // experts a token
  bool normalize = true;      // the weights of a token's experts add up to 1
  double auxiliary_loss = 0;  // coefficient of the load-balancing loss; 0: none
};

struct Routing {
  at::Tensor experts;         // int64 (tokens, top_k), best first
  at::Tensor weights;         // fp32 (tokens, top_k)
  at::Tensor load;            // int64 (experts): assignments of these tokens
  at::Tensor auxiliary_loss;  // fp32 scalar; undefined without a coefficient
};

// Softmax in fp32 over `logits` (tokens, experts), then the top_k largest. `bias` (experts), undefined or fp32, is
// added for the choice only, not to the weights (update_expert_bias). The auxiliary loss is
//   coefficient * experts * sum_e load_e / (tokens * top_k) * mean probability of e,
// which is least for equal loads (Fedus et al. 2021, Switch Transformer, arXiv:2101.03961, section 2.2).
[[nodiscard]] Routing route(const at::Tensor& logits, const RouterOptions& options, const at::Tensor& bias = {});

// Balancing without a loss: experts with more than the mean load become less eligible by `rate`, others more
// (Wang et al. 2024, arXiv:2408.15664). `load`: of all ranks, since the last update. Writes `bias` (experts) in place.
void update_expert_bias(at::Tensor bias, const at::Tensor& load, double rate);

// x itself; in backward `loss` receives the gradient `scale`, as if it had been added to the final loss times `scale`.
[[nodiscard]] at::Tensor attach_loss(const at::Tensor& x, const at::Tensor& loss, double scale);

}  // namespace fsdp::moe
