#include "fsdp/mesh/rank_generator.h"

#include <ATen/CPUGeneratorImpl.h>

namespace fsdp {
namespace {

thread_local at::Generator* own = nullptr;

}  // namespace

at::Generator& rank_generator() {
  if (own != nullptr) return *own;
  static at::Generator shared = at::detail::getDefaultCPUGenerator();
  return shared;
}

OwnRankGenerator::OwnRankGenerator(std::uint64_t seed)
    : generator_(at::detail::createCPUGenerator(seed)), previous_(own) {
  own = &generator_;
}
OwnRankGenerator::~OwnRankGenerator() { own = previous_; }

}  // namespace fsdp
