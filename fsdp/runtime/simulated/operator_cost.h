// Work of one ATen operator, from its name and inputs.
#pragma once

#include <ATen/record_function.h>

namespace fsdp {

struct OperatorWork {
  double flops = 0;  // of matrix products and attention, multiplications and additions both counted
  double bytes = 0;  // memory traffic
  // Views and allocations: no work, and they do not make their caller a composite operator.
  bool free = false;
};

[[nodiscard]] OperatorWork operator_work(const at::RecordFunction& function);

}  // namespace fsdp
