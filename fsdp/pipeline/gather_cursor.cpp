#include "fsdp/pipeline/gather_cursor.h"

#include <algorithm>

#include "fsdp/base/check.h"

namespace fsdp::pipeline {

void GatherCursor::start(std::vector<FsdpModule*> uses) {
  uses_ = std::move(uses);
  next_ = 0;
}

void GatherCursor::use(FsdpModule& unit) {
  FSDP_CHECK(next_ < uses_.size() && uses_[next_] == &unit, Error,
             "a schedule used unit \"{}\" where the use of {} was due", unit.name(),
             next_ < uses_.size() ? "\"" + uses_[next_]->name() + "\"" : "none");
  unit.gather();
  ++next_;
  const std::size_t until = std::min(uses_.size(), next_ + static_cast<std::size_t>(ahead_));
  for (std::size_t i = next_; i < until; ++i) uses_[i]->gather();
  unit.unshard();
}

bool GatherCursor::wanted_soon(const FsdpModule& unit) const {
  const std::size_t until = std::min(uses_.size(), next_ + static_cast<std::size_t>(ahead_));
  return std::find(uses_.begin() + static_cast<std::ptrdiff_t>(next_),
                   uses_.begin() + static_cast<std::ptrdiff_t>(until),
                   &unit) != uses_.begin() + static_cast<std::ptrdiff_t>(until);
}

void GatherCursor::release(FsdpModule& unit) {
  if (!wanted_soon(unit)) unit.reshard();
}

}  // namespace fsdp::pipeline
