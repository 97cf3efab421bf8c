// Numbers that look random but are a pure function of their inputs: the same on every rank and machine.
#pragma once

#include <cstdint>
#include <initializer_list>

namespace fsdp::data {

// The finaliser of splitmix64: a bijection that scatters neighbouring numbers.
constexpr std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// One number from several; their order counts.
constexpr std::uint64_t hash(std::initializer_list<std::uint64_t> parts) {
  std::uint64_t state = 0;
  for (const auto part : parts) state = mix(state ^ mix(part));
  return state;
}

}  // namespace fsdp::data
