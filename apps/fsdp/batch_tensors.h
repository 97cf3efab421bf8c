// Batches of tokens as tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include "fsdp/data/token_batch.h"

namespace fsdp::app {

// int64, (sequence, position).
struct BatchTensors {
  at::Tensor tokens, targets;
};

// On the CPU without copying: the tensors own the batch's memory.
[[nodiscard]] BatchTensors to_tensors(data::TokenBatch batch, c10::Device device);

}  // namespace fsdp::app
