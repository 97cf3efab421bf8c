// Addresses and byte counts of element ranges, for CPU backends.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace fsdp {

inline std::size_t byte_count(std::int64_t elements, c10::ScalarType dtype) {
  return static_cast<std::size_t>(elements) * c10::elementSize(dtype);
}

inline const std::byte* at_element(const void* base, std::int64_t index, c10::ScalarType dtype) {
  return static_cast<const std::byte*>(base) + byte_count(index, dtype);
}
inline std::byte* at_element(void* base, std::int64_t index, c10::ScalarType dtype) {
  return static_cast<std::byte*>(base) + byte_count(index, dtype);
}

inline void copy_elements(void* to, const void* from, std::int64_t elements, c10::ScalarType dtype) {
  if (elements > 0 && to != from) std::memcpy(to, from, byte_count(elements, dtype));
}

inline std::int64_t sum_before(const std::vector<std::int64_t>& counts, int index) {
  std::int64_t total = 0;
  for (int i = 0; i < index; ++i) total += counts[i];
  return total;
}

// Part `index` of `count` elements cut into `parts` ranges that differ by at most one element: [first, next part's).
inline std::int64_t part_begin(std::int64_t count, int index, int parts) { return count * index / parts; }

}  // namespace fsdp
