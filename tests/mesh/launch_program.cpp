// A program for launch_test.sh: ranks that reduce in a loop, of which the last does something else in the middle.
// Usage: launch_program MODE DEADLINE_MS      MODE: well, throw, leave, exit, stop
#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <stdexcept>
#include <string>

#include "fsdp/fsdp.h"

namespace {

constexpr int kRounds = 40, kTurn = 20;

void rank_main(const fsdp::World& world, const std::string& mode) {
  std::vector<int> ranks(static_cast<std::size_t>(world.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  const auto communicator = world.create_communicator(ranks, "loop");
  const auto stream = world.runtime()->make_stream("loop");
  std::vector<float> data(1 << 16);
  for (int i = 1; i <= kRounds; ++i) {
    if (i == kTurn && world.rank().value() == world.size() - 1) {
      if (mode == "throw") throw std::runtime_error("the disk is full");
      if (mode == "leave") return;
      if (mode == "exit") _exit(0);
      if (mode == "stop") raise(SIGSTOP);
    }
    data.assign(data.size(), 1.0F);
    communicator.all_reduce(data.data(), data.data(), fsdp::Elements(static_cast<std::int64_t>(data.size())),
                            c10::kFloat, fsdp::ReduceOp::sum, stream, "step");
    stream.synchronize();
    if (data.back() != static_cast<float>(world.size())) throw std::runtime_error("a wrong sum");
  }
  std::fputs(fmt::format("rank {} is done\n", world.rank().value()).c_str(), stdout);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "well";
  const int deadline = argc > 2 ? std::atoi(argv[2]) : 60000;
  try {
    fsdp::launch([&](const fsdp::World& world) { rank_main(world, mode); },
                 {.ranks = 2, .world = {.deadline = std::chrono::milliseconds(deadline)}});
  } catch (const fsdp::AbortedError& error) {
    std::fputs(fmt::format("aborted: {}\n", error.what()).c_str(), stderr);
    return 3;
  } catch (const std::exception& error) {
    std::fputs(fmt::format("error: {}\n", error.what()).c_str(), stderr);
    return 1;
  }
}
