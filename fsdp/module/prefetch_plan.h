// Which units to gather ahead when a unit is needed. Pure: indices in, indices out, nothing allocated after `build`.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "fsdp/module/options.h"

namespace fsdp {

// For each unit and phase the units that follow it, at most `depth`, among those that own weights.
class PrefetchTable {
 public:
  PrefetchTable() = default;
  // `orders` hold every unit once; `owns_weights` is [unit].
  PrefetchTable(std::span<const int> forward, std::span<const int> backward, const std::vector<bool>& owns_weights,
                int depth);

  // The lists of Prefetch::lists.
  void set(Phase phase, int unit, std::vector<int> targets) {
    tables_[static_cast<int>(phase)][unit] = std::move(targets);
  }
  [[nodiscard]] std::span<const int> after(Phase phase, int unit) const {
    return tables_[static_cast<int>(phase)][unit];
  }

 private:
  std::vector<std::vector<int>> tables_[2];  // [phase][unit] -> units, nearest first
};

// The order in which units were needed during the last iteration of each kind (signature: equal on all ranks), replayed
// one step ahead. A departure from it is counted and ends the replay for that iteration; it is never fatal.
class RecordedOrder {
 public:
  void begin(std::uint64_t signature);
  // A unit is needed now. Returns the units that were needed next last time, empty when unknown.
  [[nodiscard]] std::span<const int> need(int unit, int depth);
  void end();      // keeps what was seen since `begin` as the recording of its signature
  void discard();  // forgets it

  [[nodiscard]] std::int64_t mismatches() const { return mismatches_; }
  [[nodiscard]] bool active() const { return active_; }

 private:
  std::unordered_map<std::uint64_t, std::vector<int>> recordings_;
  std::vector<int> seen_;  // of this iteration
  const std::vector<int>* replay_ = nullptr;
  std::size_t cursor_ = 0;
  std::uint64_t signature_ = 0;
  std::int64_t mismatches_ = 0;
  bool active_ = false;
};

}  // namespace fsdp
