// The tensors of a context and its optimizer that a checkpoint holds, as one rank has them: pieces of whole tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/layout/global_layout.h"
#include "fsdp/module/context.h"
#include "fsdp/optim/optimizer.h"

namespace fsdp::checkpoint {

// Elements of one whole tensor that this rank holds.
struct LocalTensor {
  std::string key;                  // as in TensorIndex
  std::vector<std::int64_t> sizes;  // of the whole tensor, over all ranks that hold parts of it (experts included)
  std::vector<std::int64_t> strides;
  ElementRange elements;  // in the order of the strides
  at::Tensor values;      // 1-D view of them, on the device; writing to it changes the state
};

// Tensors that the same ranks hold alike: exactly those on which the signature is equal.
struct LocalBlock {
  std::int64_t signature = 0;
  std::vector<LocalTensor> tensors;
};

// Of the parts that ranks hold under one name, which lie one after the other along the first dimension, this rank's.
struct Partition {
  std::int64_t index = 0, count = 1;
};

// How often the optimizer has updated a parameter: one number a part, in the stored tensor `key`.
struct LocalStep {
  std::string key;
  Partition partition;
};

struct LocalState {
  std::vector<LocalBlock> blocks;
  std::vector<LocalStep> steps;  // in the order of ShardedOptimizer::parameter_states; the blocks of one rank have them
                                 // as tensors
};

inline constexpr const char* kStepPrefix = "optimizer/step/";

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

// What every rank tells all others before `local_state`: two numbers a unit. Throws UsageError for a mesh axis of which
// nobody has said what its ranks hold.
[[nodiscard]] std::vector<std::int64_t> partition_claims(FsdpContext& context);

// `claims`: [rank] of all ranks. `optimizer` may be null; `added`: whole tensors that all ranks which have them hold
// alike. Views of the state as it is now: taken anew before each save and load. Throws UsageError for two parameters of
// one name.
[[nodiscard]] LocalState local_state(FsdpContext& context, ShardedOptimizer* optimizer, const NamedTensors& added,
                                     const std::vector<std::vector<std::int64_t>>& claims);

// As safetensors calls it. Throws UsageError for a dtype that the format lacks, with `key`.
[[nodiscard]] std::string dtype_name(c10::ScalarType dtype, const std::string& key);
[[nodiscard]] c10::ScalarType dtype_of(const std::string& name);

}  // namespace fsdp::checkpoint
