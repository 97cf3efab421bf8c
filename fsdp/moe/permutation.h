// Tokens in the order of their experts, and back. Differentiable; every sum has one order, so results are the same bits
// in every run.
#pragma once

#include <ATen/core/Tensor.h>

namespace fsdp::moe {

// A choice of `top_k` experts for each of some tokens, sorted by expert; tokens of one expert keep their order.
struct Permutation {
  at::Tensor order;    // int64 (tokens * top_k): position in (token, choice) order of each sorted row
  at::Tensor inverse;  // int64 (tokens * top_k): row of each position
  std::int64_t top_k = 1;
};

[[nodiscard]] Permutation sort_by_expert(const at::Tensor& experts);  // int64 (tokens, top_k)

// x (tokens, width) -> rows (tokens * top_k, width) in sorted order.
[[nodiscard]] at::Tensor permute(const at::Tensor& x, const Permutation& permutation);
// weights (tokens, top_k) -> (tokens * top_k) in sorted order.
[[nodiscard]] at::Tensor permute_weights(const at::Tensor& weights, const Permutation& permutation);
// rows (tokens * top_k, width) -> (tokens, width): the sum of each token's rows, in the order of its choices.
[[nodiscard]] at::Tensor unpermute(const at::Tensor& rows, const Permutation& permutation);

}  // namespace fsdp::moe
