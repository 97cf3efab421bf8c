// Gathers units along a list of uses that is known beforehand, one use ahead.
//
// The successor of a unit in module order is the wrong one when forwards and backwards take turns, and a gather that
// waits for the moment of its use starts behind the release before it. The order of uses of a whole step is known, so
// the gather of the next use is issued before the current one computes, and a unit whose next use comes next stays.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "fsdp/module/fsdp_module.h"

namespace fsdp::pipeline {

class GatherCursor {
 public:
  // `ahead`: uses gathered beforehand; 0: each at its use.
  explicit GatherCursor(int ahead) : ahead_(ahead) {}

  // The uses to come, in order.
  void start(std::vector<FsdpModule*> uses);
  // The next use: the current stream may read the unit's weights from here on. Throws Error when another use was due.
  void use(FsdpModule& unit);
  // After a use, when the caller is done with the unit. It stays when its next use is among those gathered ahead.
  void release(FsdpModule& unit);
  [[nodiscard]] bool finished() const { return next_ == uses_.size(); }

 private:
  [[nodiscard]] bool wanted_soon(const FsdpModule& unit) const;

  const int ahead_;
  std::vector<FsdpModule*> uses_;
  std::size_t next_ = 0;
};

}  // namespace fsdp::pipeline
