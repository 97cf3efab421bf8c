// Several linear maps over consecutive rows of one input: the experts of a mixture.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace fsdp {

// How many rows each part has, in order; 0 allowed.
struct RowGroups {
  std::vector<std::int64_t> rows;
  at::Tensor ends;  // int32 (parts) on a GPU: where each part's rows end; undefined elsewhere
};
[[nodiscard]] RowGroups row_groups(std::vector<std::int64_t> rows, c10::Device device);  // does not wait for the device

// y[rows of part i] = x[rows of part i] times weight[i] transposed; x (n, in), weight (parts, out, in), y (n, out).
// The rows of the parts add up to n. Backward as of fsdp::linear: one node, the weight gradient straight into the
// packed gradients where that is possible, or later (DelayedWeightGradients). Parts without rows have zero gradients,
// so a unit completes whatever its experts received. In bf16 on a GPU one kernel computes all parts.
[[nodiscard]] at::Tensor grouped_linear(const at::Tensor& x, const at::Tensor& weight, const RowGroups& groups);

}  // namespace fsdp
