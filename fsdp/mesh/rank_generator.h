// Random numbers of one rank.
//
// Ranks that are threads share the process's default generator, whose order of draws would depend on timing; each has
// its own here. In a process of one rank it is the default generator, so torch::manual_seed acts on it.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>

#include <cstdint>

namespace fsdp {

// Of the calling thread's rank.
[[nodiscard]] at::Generator& rank_generator();

// One for a tensor's device: the rank's on the CPU, LibTorch's default elsewhere.
[[nodiscard]] at::Generator generator_for(c10::Device device);

// A new one with a seed, of a device's kind.
[[nodiscard]] at::Generator new_generator(c10::Device device, std::uint64_t seed);

// Gives the calling thread a generator of its own while it lives; for whoever runs ranks as threads.
class OwnRankGenerator {
 public:
  explicit OwnRankGenerator(std::uint64_t seed);
  ~OwnRankGenerator();
  OwnRankGenerator(const OwnRankGenerator&) = delete;
  OwnRankGenerator& operator=(const OwnRankGenerator&) = delete;

 private:
  at::Generator generator_, *previous_;
};

}  // namespace fsdp
