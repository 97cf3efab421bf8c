// A number for a text, for ranks that compare what they are about to do. Equal on all machines.
#pragma once

#include <cstdint>
#include <string_view>

namespace fsdp {

// FNV-1a, narrowed so that its negative fits too: the maximum of both over the ranks shows whether all are equal.
[[nodiscard]] constexpr std::int64_t fingerprint(std::string_view text) {
  std::uint64_t hash = 1469598103934665603ULL;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ULL;
  return static_cast<std::int64_t>(hash) >> 2;
}

}  // namespace fsdp
