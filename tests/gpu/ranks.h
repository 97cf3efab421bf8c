// What the GPU tests of several ranks share: each process of them runs every test as one rank of a world.
#pragma once

#include <vector>

#include "tests/gpu/gpu.h"

namespace fsdp::testing {

World& world();  // of this process; ranks_test.cpp makes it
inline int rank() { return static_cast<int>(world().rank().value()); }
inline int size() { return world().size(); }

inline std::vector<int> all_ranks() {
  std::vector<int> ranks;
  for (int r = 0; r < size(); ++r) ranks.push_back(r);
  return ranks;
}

inline at::TensorOptions on_gpu(c10::ScalarType dtype = at::kFloat) {
  return at::TensorOptions().dtype(dtype).device(world().runtime()->device());
}

}  // namespace fsdp::testing
