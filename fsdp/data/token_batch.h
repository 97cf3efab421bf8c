// Sequences to train on: tokens, and for each the one that comes after it.
#pragma once

#include <cstdint>
#include <vector>

namespace fsdp::data {

inline constexpr std::int64_t kIgnoredTarget = -100;  // counts in no loss; what cross entropy ignores by default

struct TokenBatch {
  std::int64_t sequences = 0, context = 0;
  std::vector<std::int64_t> tokens, targets;  // [sequence][position], row by row
};

}  // namespace fsdp::data
