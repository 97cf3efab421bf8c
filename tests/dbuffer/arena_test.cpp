#include "fsdp/dbuffer/arena.h"

#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/simulated/simulated_runtime.h"

namespace fsdp::testing {
namespace {

Arena make_arena(std::int64_t size) {
  return {c10::GetCPUAllocator()->allocate(static_cast<std::size_t>(size)), Bytes(size)};
}

std::int64_t offset(const Arena& arena, const void* part) {
  return static_cast<const std::byte*>(part) - static_cast<const std::byte*>(arena.base());
}

TEST(Arena, TakesTheLowestPartThatFits) {
  const auto runtime = make_cpu_runtime();
  const Stream user = runtime->compute_stream();
  Arena arena = make_arena(5 * 4096);
  void* a = arena.acquire(Bytes(1), user);  // rounded up
  void* b = arena.acquire(Bytes(4097), user);
  void* c = arena.acquire(Bytes(4096), user);
  EXPECT_EQ(offset(arena, a), 0);
  EXPECT_EQ(offset(arena, b), 4096);
  EXPECT_EQ(offset(arena, c), 3 * 4096);
  EXPECT_FALSE(arena.has_room(Bytes(2 * 4096)));
  EXPECT_EQ(arena.acquire(Bytes(2 * 4096), user), nullptr);
  EXPECT_EQ(arena.in_use(), Bytes(4 * 4096));
  arena.release(b, Event());
  EXPECT_TRUE(arena.has_room(Bytes(2 * 4096)));
  EXPECT_EQ(arena.acquire(Bytes(4096), user), b);
  EXPECT_EQ(arena.peak(), Bytes(4 * 4096));
}

TEST(Arena, NeighboursServeAsOne) {
  const auto runtime = make_cpu_runtime();
  const Stream user = runtime->compute_stream();
  for (const auto& order :
       std::vector<std::vector<int>>{{0, 1, 2}, {2, 1, 0}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}}) {
    Arena arena = make_arena(3 * 4096);
    std::vector<void*> parts;
    for (int i = 0; i < 3; ++i) parts.push_back(arena.acquire(Bytes(4096), user));
    for (int i : order) arena.release(parts[i], Event());
    EXPECT_NE(arena.acquire(Bytes(3 * 4096), user), nullptr);
  }
}

// Whoever takes a part waits for all who had any of it, and for nobody else.
TEST(Arena, TheNextUserWaitsForTheLast) {
  const auto runtime = make_simulated_runtime({});
  const Stream first = runtime->make_stream("first"), second = runtime->make_stream("second"),
               third = runtime->make_stream("third");
  Arena arena(c10::DataPtr(c10::GetCPUAllocator()->allocate(4 * 4096)), Bytes(4 * 4096));
  const auto work = [&](const Stream& stream, trace::Nanoseconds time) {
    stream.enqueue([&] { runtime->spend(time); });
  };
  void* a = arena.acquire(Bytes(4096), first);
  void* b = arena.acquire(Bytes(4096), first);
  Event a_done, b_done;
  work(first, 1000);
  first.record(a_done);
  work(second, 5000);
  second.record(b_done);
  arena.release(a, a_done);
  arena.release(b, b_done);
  void* again = arena.acquire(Bytes(4096), third);
  EXPECT_EQ(again, a);
  EXPECT_EQ(third.now(), 1000);  // b lies beside it
  arena.release(again, a_done);
  EXPECT_EQ(arena.acquire(Bytes(2 * 4096), third), a);
  EXPECT_EQ(third.now(), 5000);  // of a and b
}

TEST(Arena, TheSameCallsGiveTheSamePlaces) {
  const auto runtime = make_cpu_runtime();
  const Stream user = runtime->compute_stream();
  std::vector<std::int64_t> places[2];
  for (auto& list : places) {
    Arena arena = make_arena(64 * 4096);
    std::mt19937 random(7);
    std::vector<void*> held;
    std::int64_t bytes = 0;
    for (int i = 0; i < 2000; ++i) {
      if (held.size() > 6 || (!held.empty() && random() % 2 == 0)) {
        const std::size_t k = random() % held.size();
        arena.release(held[k], Event());
        held.erase(held.begin() + static_cast<std::ptrdiff_t>(k));
        list.push_back(-1);
      } else {
        void* part = arena.acquire(Bytes(1 + static_cast<std::int64_t>(random() % (9 * 4096))), user);
        list.push_back(part == nullptr ? -2 : offset(arena, part));
        if (part != nullptr) held.push_back(part);
      }
      bytes = std::max(bytes, arena.in_use().value());
    }
    for (void* part : held) arena.release(part, Event());
    EXPECT_EQ(arena.in_use(), Bytes(0));
    EXPECT_NE(arena.acquire(Bytes(64 * 4096), user), nullptr);  // all of it is one again
  }
  EXPECT_EQ(places[0], places[1]);
}

}  // namespace
}  // namespace fsdp::testing
