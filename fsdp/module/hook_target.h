// What a module carries to be found by its unit: one pointer.
#pragma once

namespace fsdp {

class FsdpModule;

// Base of every Hooked module. The unit sets and clears the pointer; the module never owns the unit.
class HookTarget {
 public:
  virtual ~HookTarget() = default;
  HookTarget() = default;
  HookTarget(const HookTarget&) {}  // a clone of a module is in no unit
  HookTarget& operator=(const HookTarget&) { return *this; }

  [[nodiscard]] FsdpModule* unit() const { return unit_; }
  void set_unit(FsdpModule* unit) { unit_ = unit; }

 private:
  FsdpModule* unit_ = nullptr;
};

}  // namespace fsdp
