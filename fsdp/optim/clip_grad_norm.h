// Gradient norm over all ranks, and clipping to it.
#pragma once

#include <ATen/core/Tensor.h>

#include "fsdp/module/context.h"

namespace fsdp {

// The 2-norm of the whole gradient: each element counted once, however it is sharded or replicated; summed in fp64 on
// CPUs. A scalar fp32 tensor on the device, equal bit for bit on all ranks; no host wait. All ranks call it, after
// backward (or finish_grad_sync).
[[nodiscard]] at::Tensor grad_norm(FsdpContext& context);

// Scales every gradient by min(1, max_norm / (norm + 1e-6)) and returns the norm before that. A norm that is not finite
// leaves the gradients as they are; ShardedOptimizer::step(norm) then skips the update.
at::Tensor clip_grad_norm_(FsdpContext& context, double max_norm);

// Its two parts: the factor, an fp32 scalar on the norm's device, and the multiplication. (ShardedOptimizer::step takes
// a max_norm and does both.)
[[nodiscard]] at::Tensor clip_scale(const at::Tensor& norm, double max_norm);
void scale_gradients(FsdpContext& context, const at::Tensor& scale);

}  // namespace fsdp
