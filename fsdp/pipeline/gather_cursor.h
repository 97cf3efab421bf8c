// Gathers units along a list of uses that is known beforehand, some units ahead.
//
// The successor of a unit in module order is the wrong one when forwards and backwards take turns, and a gather that
// waits for the moment of its use starts behind the release before it. The order of uses of a whole step is known, so
// the next unit that is not there is gathered before the current one computes, and a unit that is used again before
// another one must be gathered stays.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "fsdp/module/fsdp_module.h"

namespace fsdp::pipeline {

class GatherCursor {
 public:
  // `ahead`: units gathered and not yet used, at most; 0: each is gathered at its use.
  explicit GatherCursor(int ahead) : ahead_(ahead) {}

  // The uses to come, in order.
  void start(std::vector<FsdpModule*> uses);
  // The next use: the current stream may read the unit's weights from here on. Throws Error when another use was due.
  void use(FsdpModule& unit);
  // After a use, when the caller is done with the unit. It stays when its next use comes before those of `ahead` others
  // that are not there yet.
  void release(FsdpModule& unit);
  [[nodiscard]] bool finished() const { return next_ == uses_.size(); }

 private:
  [[nodiscard]] bool wanted_soon(const FsdpModule& unit) const;
  [[nodiscard]] bool is_unused(const FsdpModule* unit) const;

  const int ahead_;
  std::vector<FsdpModule*> uses_;
  std::size_t next_ = 0;
  std::vector<const FsdpModule*> unused_;  // gathered ahead
};

}  // namespace fsdp::pipeline
