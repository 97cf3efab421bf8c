// The host path of a unit allocates a small, constant number of times, whatever the number of parameters.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "tests/support/train.h"

namespace {
std::atomic<bool> counting{false};
std::atomic<int> allocations{0};
void* allocate(std::size_t size) {
  if (counting.load(std::memory_order_relaxed)) allocations.fetch_add(1, std::memory_order_relaxed);
  if (void* memory = std::malloc(size == 0 ? 1 : size)) return memory;
  throw std::bad_alloc();
}
}  // namespace

void* operator new(std::size_t size) { return allocate(size); }
void* operator new[](std::size_t size) { return allocate(size); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }

namespace fsdp::testing {
namespace {

struct ManyImpl : torch::nn::Module {
  explicit ManyImpl(int count) {
    for (int i = 0; i < count; ++i) register_parameter("p" + std::to_string(i), at::ones({8}));
  }
  at::Tensor forward(at::Tensor x) { return x; }
};
FSDP_MODULE(Many);

int allocations_of_a_cycle(int parameters) {
  World world = World::single();
  auto context = FsdpContext::create(DeviceMesh(world, {{"dp", 1}}));
  Many model(parameters);
  auto& unit = context->fully_shard(model, {.register_hooks = false});
  int result = 0;
  for (int i = 0; i < 20; ++i) {
    allocations = 0;
    counting = true;
    unit.unshard();
    unit.reshard();
    counting = false;
    if (i > 2) {
      EXPECT_EQ(allocations, result) << "cycle " << i;
    }
    result = allocations;
  }
  return result;
}

TEST(Allocations, GatherAndReleaseDoNotDependOnTheNumberOfParameters) {
  const int few = allocations_of_a_cycle(2);
  EXPECT_EQ(allocations_of_a_cycle(64), few);
  EXPECT_LE(few, 16);
}

}  // namespace
}  // namespace fsdp::testing
