// What a unit will own, decided before anything is changed.
#pragma once

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "fsdp/module/scheduler.h"

namespace fsdp {

// Parameters that can share buffers.
struct GroupPlan {
  FsdpParameterGroup::Dtypes dtypes;
  bool trainable = true;
  bool replicated = false;  // small ones, left whole on every rank
  std::vector<ParameterInfo> parameters;
};

struct Scheduler::UnitPlan {
  const std::vector<std::shared_ptr<torch::nn::Module>>& modules;
  const UnitOptions& options;
  std::vector<GroupPlan> groups;
  std::vector<FsdpModule::Buffer> buffers;
  std::set<int> lenders;  // units that own weights used here
  // Tensors over the same memory as a parameter of an earlier unit.
  struct Alias {
    OwnedParameter owner;
    at::Tensor tensor;
  };
  std::vector<Alias> aliases;
  std::set<const void*> seen;  // TensorImpl
};

}  // namespace fsdp
