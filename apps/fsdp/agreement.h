// Sums of a few numbers over all ranks, for what the ranks must decide alike: the loss, and whether to stop.
//
// One per rank, made by all ranks at the same point; every call is collective and blocks until the sum is there.
#pragma once

#include <vector>

#include "fsdp/mesh/world.h"

namespace fsdp::app {

class Agreement {
 public:
  explicit Agreement(const World& world);

  // Equal bit for bit on all ranks.
  [[nodiscard]] std::vector<double> sum(std::vector<double> values) const;

 private:
  Runtime& runtime_;
  Communicator communicator_;
  Stream stream_;  // a stream of its own, so that the wait counts as time blocked by communication
};

}  // namespace fsdp::app
