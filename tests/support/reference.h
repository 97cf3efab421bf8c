// What sharded training must equal: every rank's backward run in one process on an unsharded model, summed as the
// strategy sums.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <vector>

#include "fsdp/layout/placement.h"
#include "fsdp/module/options.h"

namespace fsdp::testing {

struct ReduceRule {
  int outer = 1, inner = 1;       // mesh; rank = outer index * inner + inner index; inner is summed first
  bool outer_waits = false;       // for the last microbatch (hsdp, hfsdp)
  bool whole_until_last = false;  // ddp, zero1, or ReducePolicy::last_microbatch
  at::ScalarType reduce_dtype = at::kFloat;
};

[[nodiscard]] ReduceRule reduce_rule(const Strategy& strategy, int outer, int inner, ReducePolicy policy,
                                     at::ScalarType reduce_dtype);

// The finished gradient, fp32, from one parameter's local gradients [microbatch][rank].
[[nodiscard]] at::Tensor reduce_reference(const std::vector<std::vector<at::Tensor>>& gradients,
                                          const ReduceRule& rule);

}  // namespace fsdp::testing
