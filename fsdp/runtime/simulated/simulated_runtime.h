// The virtual clock: streams whose tasks cost modelled time, operators on meta tensors, no data.
//
// While one exists on a thread, every ATen operator that thread runs (forward and backward) costs time on the stream
// that is current there: compute, or the stream whose task is running. Create, use and destroy it on one thread, one at
// a time per thread. Deterministic: no wall clock enters.
#pragma once

#include <memory>

#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/simulated/cost_model.h"

namespace fsdp {

class SimulatedRuntime : public Runtime {
 public:
  [[nodiscard]] virtual const CostModel& costs() const = 0;

  // Adds `duration` to the stream whose task runs now (compute outside of tasks).
  virtual void spend(trace::Nanoseconds duration) = 0;
};

// Throws UsageError when this thread already has one. Registers the Meta kernels that LibTorch's C++ side lacks
// (meta_kernels.cpp) at its first use in the process.
[[nodiscard]] std::shared_ptr<SimulatedRuntime> make_simulated_runtime(const CostModel& costs);

}  // namespace fsdp
