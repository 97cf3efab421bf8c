// Sums and maxima over the buffers of several ranks in one address space, for CPU backends.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <span>

#include "fsdp/comm/collective.h"

namespace fsdp {

[[nodiscard]] bool can_reduce(c10::ScalarType dtype);

// out[i] = op over the inputs of input[i], in the order of the inputs; low precision is combined in fp32 and rounded
// once. `out` may equal any of the inputs. Throws UsageError for dtypes that cannot be reduced.
void reduce_on_cpu(std::span<const void* const> inputs, void* out, std::int64_t count, c10::ScalarType dtype,
                   ReduceOp op);

}  // namespace fsdp
