// A shuffle without a table: a pseudo-random bijection of [0, size) that is computed an element at a time.
//
// A Feistel network over the next power of two; an image outside of the range is put in again until it falls inside
// (cycle walking), on average less than twice. A pure function of size and key: equal on every rank and machine.
#pragma once

#include <array>
#include <cstdint>

namespace fsdp::data {

class Permutation {
 public:
  // size >= 1
  Permutation(std::int64_t size, std::uint64_t key);

  // Where `index` in [0, size) goes.
  [[nodiscard]] std::int64_t operator()(std::int64_t index) const;

 private:
  static constexpr int kRounds = 8;

  std::uint64_t size_;
  int right_bits_;
  std::uint64_t left_mask_, right_mask_;
  std::array<std::uint64_t, kRounds> keys_;
};

}  // namespace fsdp::data
