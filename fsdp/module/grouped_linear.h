// Several linear maps over consecutive rows of one input: the experts of a mixture.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace fsdp {

// y[rows of part i] = x[rows of part i] times weight[i] transposed; x (n, in), weight (parts, out, in), y (n, out).
// `rows`: of each part, in order, 0 allowed; they add up to n. Backward as of fsdp::linear: one node, the weight
// gradient straight into the packed gradients where that is possible, or later (DelayedWeightGradients). Parts without
// rows have zero gradients, so a unit completes whatever its experts received.
[[nodiscard]] at::Tensor grouped_linear(const at::Tensor& x, const at::Tensor& weight, std::vector<std::int64_t> rows);

}  // namespace fsdp
