#include "fsdp/data/permutation.h"

#include <bit>

#include "fsdp/base/check.h"
#include "fsdp/data/hash.h"

namespace fsdp::data {

Permutation::Permutation(std::int64_t size, std::uint64_t key) : size_(static_cast<std::uint64_t>(size)) {
  FSDP_CHECK(size >= 1, UsageError, "a permutation of {} elements: expected 1 or more", size);
  const int bits = std::bit_width(size_ - 1);
  right_bits_ = bits - bits / 2;
  left_mask_ = (std::uint64_t{1} << (bits / 2)) - 1;
  right_mask_ = (std::uint64_t{1} << right_bits_) - 1;
  for (std::size_t round = 0; round < keys_.size(); ++round) keys_[round] = hash({key, round});
}

std::int64_t Permutation::operator()(std::int64_t index) const {
  auto value = static_cast<std::uint64_t>(index);
  FSDP_CHECK(index >= 0 && value < size_, UsageError, "element {} of a permutation of {}", index, size_);
  do {
    // Each half in turn is changed by a function of the other one: whatever the function, that can be undone.
    auto left = value >> right_bits_, right = value & right_mask_;
    for (std::size_t round = 0; round < keys_.size(); round += 2) {
      left ^= mix(right ^ keys_[round]) & left_mask_;
      right ^= mix(left ^ keys_[round + 1]) & right_mask_;
    }
    value = left << right_bits_ | right;
  } while (value >= size_);
  return static_cast<std::int64_t>(value);
}

}  // namespace fsdp::data
