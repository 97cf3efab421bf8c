#include "fsdp/pipeline/gather_cursor.h"

#include <algorithm>

#include "fsdp/base/check.h"

namespace fsdp::pipeline {

void GatherCursor::start(std::vector<FsdpModule*> uses) {
  uses_ = std::move(uses);
  next_ = 0;
  unused_.clear();
}

bool GatherCursor::is_unused(const FsdpModule* unit) const {
  return std::find(unused_.begin(), unused_.end(), unit) != unused_.end();
}

void GatherCursor::use(FsdpModule& unit) {
  FSDP_CHECK(next_ < uses_.size() && uses_[next_] == &unit, Error,
             "a schedule used unit \"{}\" where the use of {} was due", unit.name(),
             next_ < uses_.size() ? "\"" + uses_[next_]->name() + "\"" : "none");
  std::erase(unused_, &unit);
  unit.gather();
  ++next_;
  for (std::size_t i = next_; i < uses_.size() && static_cast<int>(unused_.size()) < ahead_; ++i) {
    if (uses_[i]->ready()) continue;
    uses_[i]->gather();
    unused_.push_back(uses_[i]);
  }
  unit.unshard();
}

bool GatherCursor::wanted_soon(const FsdpModule& unit) const {
  std::vector<const FsdpModule*> others;  // that must be gathered, or were gathered ahead, before the unit's next use
  for (std::size_t i = next_; i < uses_.size() && static_cast<int>(others.size()) < ahead_; ++i) {
    const FsdpModule* next = uses_[i];
    if (next == &unit) return true;
    const bool there = next->ready() && !is_unused(next);
    if (!there && std::find(others.begin(), others.end(), next) == others.end()) others.push_back(next);
  }
  return false;
}

void GatherCursor::release(FsdpModule& unit) {
  if (!wanted_soon(unit)) unit.reshard();
}

}  // namespace fsdp::pipeline
