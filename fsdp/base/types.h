// Integer types that cannot be mixed up: a byte count is never passed where an element count is due.
#pragma once

#include <compare>
#include <cstdint>

namespace fsdp {

// A 64-bit integer that only combines with its own kind. Converting to a plain integer is explicit: `.value()`.
template <typename Tag>
class StrongInteger {
 public:
  constexpr StrongInteger() = default;
  constexpr explicit StrongInteger(std::int64_t value) : value_(value) {}

  [[nodiscard]] constexpr std::int64_t value() const { return value_; }

  constexpr auto operator<=>(const StrongInteger&) const = default;
  constexpr StrongInteger& operator+=(StrongInteger other) {
    value_ += other.value_;
    return *this;
  }
  constexpr StrongInteger& operator-=(StrongInteger other) {
    value_ -= other.value_;
    return *this;
  }
  friend constexpr StrongInteger operator+(StrongInteger a, StrongInteger b) { return a += b; }
  friend constexpr StrongInteger operator-(StrongInteger a, StrongInteger b) { return a -= b; }
  friend constexpr StrongInteger operator*(StrongInteger a, std::int64_t n) { return StrongInteger(a.value_ * n); }

 private:
  std::int64_t value_ = 0;
};

using Bytes = StrongInteger<struct BytesTag>;
using Elements = StrongInteger<struct ElementsTag>;  // of one tensor or buffer, whatever its dtype

// Position of a process or thread in a group, 0 <= rank < size of the group.
using Rank = StrongInteger<struct RankTag>;

constexpr Bytes bytes_of(Elements count, std::int64_t element_size) { return Bytes(count.value() * element_size); }

}  // namespace fsdp
