#include "tests/support/reference.h"

#include <ATen/TensorOperators.h>

namespace fsdp::testing {
namespace {

// In rank order, in fp32, rounded once to the wire dtype.
at::Tensor sum(const std::vector<at::Tensor>& values, at::ScalarType dtype) {
  at::Tensor total = values[0].to(dtype).to(at::kFloat);
  for (std::size_t i = 1; i < values.size(); ++i) total = total + values[i].to(dtype).to(at::kFloat);
  return total.to(dtype);
}

}  // namespace

ReduceRule reduce_rule(const Strategy& strategy, int outer, int inner, ReducePolicy policy,
                       at::ScalarType reduce_dtype) {
  ReduceRule rule;
  const bool two_axes = strategy.axes.size() == 2;
  rule.outer = two_axes ? outer : 1;
  rule.inner = two_axes ? inner : outer * inner;
  rule.reduce_dtype = reduce_dtype;
  rule.outer_waits = two_axes && outer > 1 && strategy.gradient[0] == Placement::partial;
  const bool partial = strategy.gradient == PlacementList(strategy.axes.size(), Placement::partial);
  // With one rank there is nothing to put off.
  rule.whole_until_last = outer * inner > 1 && (partial || policy == ReducePolicy::last_microbatch);
  return rule;
}

at::Tensor reduce_reference(const std::vector<std::vector<at::Tensor>>& gradients, const ReduceRule& rule) {
  const int ranks = rule.outer * rule.inner;
  const std::size_t microbatches = gradients.size();
  const auto inner_sum = [&](const std::vector<at::Tensor>& by_rank, int o) {
    return sum({by_rank.begin() + o * rule.inner, by_rank.begin() + (o + 1) * rule.inner}, rule.reduce_dtype);
  };
  const auto whole_sum = [&](const std::vector<at::Tensor>& by_rank) {
    std::vector<at::Tensor> outer;
    for (int o = 0; o < rule.outer; ++o) outer.push_back(inner_sum(by_rank, o));
    return sum(outer, rule.reduce_dtype).to(at::kFloat) / static_cast<double>(ranks);
  };
  if (rule.whole_until_last) {
    std::vector<at::Tensor> by_rank = gradients[0];
    if (microbatches > 1) {
      for (int r = 0; r < ranks; ++r) {
        by_rank[r] = by_rank[r].to(at::kFloat);
        for (std::size_t m = 1; m < microbatches; ++m) by_rank[r] = by_rank[r] + gradients[m][r].to(at::kFloat);
      }
    }
    return whole_sum(by_rank);
  }
  if (rule.outer_waits) {
    if (microbatches == 1) return whole_sum(gradients[0]);
    std::vector<at::Tensor> outer;
    for (int o = 0; o < rule.outer; ++o) {
      at::Tensor total = inner_sum(gradients[0], o).to(at::kFloat);
      for (std::size_t m = 1; m < microbatches; ++m) total = total + inner_sum(gradients[m], o).to(at::kFloat);
      outer.push_back(total);
    }
    return sum(outer, rule.reduce_dtype).to(at::kFloat) / static_cast<double>(ranks);
  }
  at::Tensor total = whole_sum(gradients[0]);
  for (std::size_t m = 1; m < microbatches; ++m) total = total + whole_sum(gradients[m]);
  return total;
}

}  // namespace fsdp::testing
