#include "fsdp/mesh/rank_generator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>

#include <mutex>

namespace fsdp {
namespace {

thread_local at::Generator* own = nullptr;

}  // namespace

at::Generator& rank_generator() {
  if (own != nullptr) return *own;
  static at::Generator shared = at::detail::getDefaultCPUGenerator();
  return shared;
}

at::Generator generator_for(c10::Device device) {
  return device.is_cuda() ? at::globalContext().defaultGenerator(device) : rank_generator();
}

at::Generator new_generator(c10::Device device, std::uint64_t seed) {
  if (!device.is_cuda()) return at::detail::createCPUGenerator(seed);
  at::Generator generator = at::globalContext().defaultGenerator(device).clone();
  std::lock_guard lock(generator.mutex());
  generator.set_current_seed(seed);
  return generator;
}

OwnRankGenerator::OwnRankGenerator(std::uint64_t seed)
    : generator_(at::detail::createCPUGenerator(seed)), previous_(own) {
  own = &generator_;
}
OwnRankGenerator::~OwnRankGenerator() { own = previous_; }

}  // namespace fsdp
