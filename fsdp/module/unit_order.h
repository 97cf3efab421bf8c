// The static orders of a forest of units. Pure.
#pragma once

#include <vector>

namespace fsdp {

struct UnitTree {
  std::vector<int> roots;                  // [order of registration]
  std::vector<std::vector<int>> children;  // [unit] in execution order
};

// Pre-order walk of all roots: a unit's own weights are needed from the start of its forward.
[[nodiscard]] std::vector<int> forward_order(const UnitTree& tree);

// The reverse of execution: roots from the last to the first, each before its children, children from the last to the
// first. Not the reverse of forward_order for nested trees.
[[nodiscard]] std::vector<int> backward_order(const UnitTree& tree);

}  // namespace fsdp
