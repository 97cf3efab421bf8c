// The cross entropy of an output head, in chunks of rows: logits of the whole sequence never exist at once.
//
// Forward makes the logits of a chunk, their losses and what backward needs of them (one number a row); backward makes
// them again and turns them into gradients in place. The last chunk's are kept in between (at most 512 MiB): backward
// begins with them, and its first chunk takes that memory anyway. On a GPU each is one kernel over the logits. The
// weight's gradient goes straight into the unit's packed gradients, as with fsdp::linear. The idea is that of Liger
// Kernel's fused linear cross entropy (Hsu et al., arXiv 2410.10989), with gradients made in backward, where a sharded
// weight is gathered.
#pragma once

#include <ATen/core/Reduction.h>
#include <ATen/core/Tensor.h>

#include <cstdint>

namespace fsdp {

struct LinearCrossEntropyOptions {
  at::Reduction::Reduction reduction = at::Reduction::Mean;  // or Sum; over the targets that count
  std::int64_t chunk_rows = 0;                               // 0: as many as fit into 512 MiB of logits, at least 128
};

// x (..., width), weight (vocabulary, width), targets int64 (...): those that are negative count for nothing. A scalar
// in fp32 on x's device; without a target that counts, Mean is NaN. Gradients flow to x and weight; gradients of
// gradients are refused. Throws UsageError for shapes that do not fit.
[[nodiscard]] at::Tensor linear_cross_entropy(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& targets,
                                              const LinearCrossEntropyOptions& options = {});

}  // namespace fsdp
