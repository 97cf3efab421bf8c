#include "fsdp/comm/communicator.h"

#include <ATen/Parallel.h>

#include <atomic>

#include "fsdp/mesh/run_ranks.h"
#include "tests/comm/conformance.h"

namespace fsdp::testing {
namespace {

TEST(Communicator, OneThatWasNeverCreatedRefusesEveryOperation) {
  const Communicator none;
  const Stream stream = make_cpu_runtime()->compute_stream();
  float data[4] = {};
  const Elements one(1);
  EXPECT_FALSE(none);
  EXPECT_THAT(refusal([&] { none.barrier(stream, "x"); }),
              HasSubstr("barrier \"x\": this communicator was never created"));
  EXPECT_THAT(refusal([&] { none.all_reduce(data, data, one, c10::kFloat, ReduceOp::sum, stream, "x"); }),
              HasSubstr("never created"));
  EXPECT_THAT(refusal([&] { none.broadcast(data, one, c10::kFloat, Rank(0), stream, "x"); }),
              HasSubstr("never created"));
}

TEST(SimulatedCommunicator, CostsLatencyAndBytesOverTheLink) {
  CostModel costs;
  costs.link_bytes_per_second = 1e9;  // one byte a nanosecond
  costs.collective_latency = 500;
  for (int size : {2, 4, 7}) {
    World world = World::simulated(size, costs);
    const Stream stream = world.runtime()->make_stream("link");
    const Communicator c = world.create_communicator(everyone(world), "all");
    const auto cost = [&](const std::function<void()>& call) {
      const auto before = stream.now();
      call();
      return stream.now() - before;
    };
    const Elements count(1000 * size);
    const auto bytes = count.value() * 4;
    EXPECT_EQ(cost([&] { c.all_gather(nullptr, nullptr, count, c10::kFloat, stream, "g"); }), 500 + bytes * (size - 1));
    EXPECT_EQ(cost([&] { c.reduce_scatter(nullptr, nullptr, count, c10::kFloat, stream, "r"); }),
              500 + bytes * (size - 1));
    EXPECT_EQ(cost([&] { c.all_reduce(nullptr, nullptr, count, c10::kFloat, ReduceOp::sum, stream, "a"); }),
              500 + 2 * bytes * (size - 1) / size);
    EXPECT_EQ(cost([&] { c.broadcast(nullptr, count, c10::kBFloat16, Rank(1), stream, "b"); }), 500 + bytes / 2);
    EXPECT_EQ(cost([&] { c.barrier(stream, "w"); }), 500);
    std::vector<std::int64_t> parts(size, 10);
    parts[0] = 1'000'000;  // its own part stays
    EXPECT_EQ(cost([&] { c.all_to_all_v(nullptr, parts, nullptr, parts, c10::kDouble, stream, "t"); }),
              500 + 8 * 10 * (size - 1));
    EXPECT_EQ(world.runtime()->compute_stream().now(), 0) << "compute pays nothing";
  }
}

TEST(SimulatedCommunicator, OneRankPaysNothing) {
  World world = World::simulated(1);
  const Stream stream = world.runtime()->make_stream("link");
  const Communicator c = world.create_communicator(everyone(world), "alone");
  c.all_gather(nullptr, nullptr, Elements(1 << 20), c10::kFloat, stream, "g");
  EXPECT_EQ(stream.now(), 0);
}

TEST(RunRanks, SharesTheCoresAndGivesEachRankItsOwnWorld) {
  std::atomic<int> sum = 0;
  const int threads = at::get_num_threads();
  run_ranks(3, [&](World world) {
    EXPECT_EQ(world.size(), 3);
    EXPECT_EQ(world.backend_name(), "threads");
    EXPECT_EQ(at::get_num_threads(), std::max(1, threads / 3));
    sum += 1 << world.rank().value();
  });
  EXPECT_EQ(sum, 7);
}

TEST(RunRanks, RefusesImpossibleNumbersOfRanks) {
  for (int size : {0, -1, 257}) {
    EXPECT_EQ(refusal([&] { run_ranks(size, [](World) {}); }),
              "expected 1 to 256 in-process ranks, got " + std::to_string(size));
  }
}

TEST(RunRanks, KeepsErrorsThatAreNoStandardExceptions) {
  EXPECT_THROW(run_ranks(2,
                         [](World world) {
                           if (world.rank() == Rank(1)) throw 42;
                         }),
               int);
}

TEST(RunRanks, RanksThatMadeDifferentNumbersOfGroupsStillMeetInACommonOne) {
  run_ranks(3,
            [](World world) {
              Stream stream = world.runtime()->make_stream("s");
              if (world.rank() != Rank(0)) (void)world.create_communicator(std::vector<int>{1, 2}, "pair");
              const Communicator all = world.create_communicator(std::vector<int>{0, 1, 2}, "all");
              std::int64_t one = 1;
              all.all_reduce(&one, &one, Elements(1), c10::kLong, ReduceOp::sum, stream, "count");
              EXPECT_EQ(failure_of(stream), "no error");
              EXPECT_EQ(one, 3);
              stream.reset();
            },
            {.deadline = 500ms});
}

// Point to point as well, and long before the deadline.
TEST(RunRanks, ARankThatHasEndedIsNoticedByWhoeverSendsToItOrWaitsForIt) {
  for (const bool sends : {false, true}) {
    run_ranks(2,
              [&](World world) {
                const Communicator pair = world.create_communicator(std::vector<int>{0, 1}, "pair");
                if (world.rank() == Rank(1)) return;
                const Stream stream = world.runtime()->make_stream("s");
                float value = 0;
                if (sends)
                  pair.send(&value, Elements(1), at::kFloat, Rank(1), stream, "x");
                else
                  pair.receive(&value, Elements(1), at::kFloat, Rank(1), stream, "x");
                EXPECT_THAT(failure_of(stream), HasSubstr("cannot complete, for a rank has ended: rank 1"));
                stream.reset();
              },
              {.deadline = std::chrono::hours(1)});  // of ctest, that is: a failure hangs until its time limit
  }
}

}  // namespace
}  // namespace fsdp::testing
