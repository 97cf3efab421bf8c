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

// Of the tokens (FNV-1a), to compare what ranks and runs train on.
[[nodiscard]] inline std::uint64_t digest(const TokenBatch& batch) {
  std::uint64_t value = 14695981039346656037ULL;
  for (const auto token : batch.tokens) value = (value ^ static_cast<std::uint64_t>(token)) * 1099511628211ULL;
  return value;
}

}  // namespace fsdp::data
