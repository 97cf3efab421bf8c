#include "fsdp/module/dropout.h"

#include <ATen/ops/empty_like.h>

#include "fsdp/base/check.h"
#include "fsdp/mesh/rank_generator.h"

namespace fsdp {

at::Tensor dropout(const at::Tensor& x, double p, bool training) {
  FSDP_CHECK(p >= 0 && p <= 1, UsageError, "dropout: probability {}, expected 0 to 1", p);
  if (!training || p == 0) return x;
  if (p == 1) return x * 0;
  return x * at::empty_like(x).bernoulli_(1 - p, generator_for(x.device())).div_(1 - p);
}

namespace nn {

DropoutImpl::DropoutImpl(double p) : p_(p) {
  FSDP_CHECK(p >= 0 && p <= 1, UsageError, "Dropout: probability {}, expected 0 to 1", p);
}
at::Tensor DropoutImpl::forward(const at::Tensor& x) { return fsdp::dropout(x, p_, is_training()); }

}  // namespace nn
}  // namespace fsdp
