// Latency and bandwidth of the CPU communicators by size: all_gather, reduce_scatter, all_reduce and barrier.
//
// Ranks are threads of this process, or the processes of an mpirun; rank 0 prints the median over rounds of the time
// from the call to the end of the operation, on its communication stream, with both ranks' calls made together.
//   bench_collectives [ranks] [rounds]          mpirun -n 2 bench_collectives
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "bench/json_line.h"
#include "fsdp/fsdp.h"

namespace {

using Clock = std::chrono::steady_clock;

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

struct Operation {
  const char* name;
  std::function<void()> enqueue;
};

void measure(const fsdp::World& world, int rounds) {
  std::vector<int> ranks(static_cast<std::size_t>(world.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  const auto communicator = world.create_communicator(ranks, "bench");
  const auto meeting = world.create_communicator(ranks, "meeting");
  const auto stream = world.runtime()->make_stream("bench");
  constexpr std::int64_t kLargest = 16 << 20;
  std::vector<float> whole(kLargest / sizeof(float)), result(whole.size());
  for (std::int64_t bytes = 1 << 10; bytes <= kLargest; bytes *= 4) {
    const std::int64_t total = bytes / static_cast<std::int64_t>(sizeof(float));
    const fsdp::Elements share(total / world.size());
    float* own = whole.data() + world.rank().value() * share.value();
    const std::vector<Operation> operations{
        {"all_gather", [&] { communicator.all_gather(own, whole.data(), share, c10::kFloat, stream, "gather"); }},
        {"reduce_scatter",
         [&] { communicator.reduce_scatter(whole.data(), own, share, c10::kFloat, stream, "reduce"); }},
        {"all_reduce", [&] {
           communicator.all_reduce(whole.data(), result.data(), fsdp::Elements(total), c10::kFloat, fsdp::ReduceOp::sum,
                                   stream, "all");
         }}};
    for (const auto& operation : operations) {
      std::vector<double> times;
      for (int round = 0; round < rounds + 3; ++round) {
        meeting.barrier(stream, "meet");
        stream.synchronize();
        const auto start = Clock::now();
        operation.enqueue();
        stream.synchronize();
        times.push_back(std::chrono::duration<double, std::micro>(Clock::now() - start).count());
      }
      times.erase(times.begin(), times.begin() + 3);
      if (world.rank() != fsdp::Rank(0)) continue;
      const auto name = std::string(operation.name) + "_" + std::to_string(bytes >> 10) + "KiB";
      const double us = median(times);
      fsdp::bench::print({.bench = "collectives_" + world.backend_name(), .metric = name, .value = us, .unit = "us"});
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int ranks = argc > 1 ? std::atoi(argv[1]) : 2;
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 50;
  fsdp::launch([&](fsdp::World world) { measure(world, rounds); }, {.ranks = ranks});
}
