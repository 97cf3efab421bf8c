// The gate of a feed-forward (Shazeer 2020, arXiv 2002.05202): silu(gate) * up.
#pragma once

#include <ATen/core/Tensor.h>

namespace fsdp::models {

// Equal sizes and dtypes. On a GPU one kernel forward and one backward, in fp32 and rounded once; elsewhere LibTorch's
// operators. No gradients of gradients on a GPU.
[[nodiscard]] at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);

}  // namespace fsdp::models
