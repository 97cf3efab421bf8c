// Brings its own main(): rank 0 reports as usual, the others only what fails on them.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <memory>

#include "fsdp/mesh/launcher.h"
#include "fsdp/mesh/process_world.h"
#include "tests/support/ranks.h"

namespace fsdp::testing {
namespace {

Launcher launcher() { return find_launcher().value_or(Launcher{}); }

std::vector<int> everyone(int size) {
  std::vector<int> ranks;
  for (int r = 0; r < size; ++r) ranks.push_back(r);
  return ranks;
}

class OwnWorld final : public SideChannel {
 public:
  explicit OwnWorld(const World& world)
      : stream_(world.runtime()->make_stream("side")),
        communicator_(world.create_communicator(everyone(world.size()), "side")) {}

  std::vector<std::int64_t> gather(int /*rank*/, std::int64_t value) override {
    std::vector<std::int64_t> values(static_cast<std::size_t>(communicator_.size()));
    communicator_.all_gather(&value, values.data(), Elements(1), c10::kLong, stream_, "side");
    stream_.synchronize();
    return values;
  }

 private:
  Stream stream_;
  Communicator communicator_;
};

std::unique_ptr<OwnWorld> job;  // of all processes; also keeps them connected between tests

class FailuresOnly final : public ::testing::EmptyTestEventListener {
  void OnTestStart(const ::testing::TestInfo& test) override {
    name_ = fmt::format("{}.{}", test.test_suite_name(), test.name());
  }
  // Called under gtest's lock: asks it nothing.
  void OnTestPartResult(const ::testing::TestPartResult& result) override {
    if (!result.failed()) return;
    std::fputs(fmt::format("rank {}: {}: {}:{}: {}\n", own_process_rank(), name_,
                           result.file_name() ? result.file_name() : "", result.line_number(), result.message())
                   .c_str(),
               stderr);
  }
  std::string name_;
};

}  // namespace

void run_on_ranks(int size, const RankMain& rank_main, const WorldOptions& options) {
  job->meet(launcher().rank);  // nobody waits for a process that is still busy with the run before
  const auto world = process_world(launcher(), options, size);
  const auto side_world = process_world(launcher(), {.deadline = std::chrono::seconds(20)}, size);
  if (!world) return;
  OwnWorld side(*side_world);
  try {
    rank_main(*world, side);
  } catch (const std::exception& error) {
    world->abort(fmt::format("rank {} failed: {}", world->rank().value(), error.what()));
    throw;
  }
}

std::string backend_under_test() { return launcher().name == "torchrun" ? "zeromq" : "mpi"; }
std::vector<int> world_sizes_under_test() {
  std::vector<int> sizes;
  for (int size = 1; size <= launcher().size; ++size) sizes.push_back(size);
  return sizes;
}
bool ranks_are_processes() { return true; }
int own_process_rank() { return launcher().rank; }

}  // namespace fsdp::testing

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  const auto launcher = fsdp::find_launcher();
  if (!launcher) {
    std::fputs("start this test with mpirun or torchrun\n", stderr);
    return 1;
  }
  if (launcher->rank != 0) {
    auto& listeners = ::testing::UnitTest::GetInstance()->listeners();
    delete listeners.Release(listeners.default_result_printer());
    listeners.Append(new fsdp::testing::FailuresOnly);
  }
  fsdp::testing::job = std::make_unique<fsdp::testing::OwnWorld>(
      *fsdp::process_world(*launcher, {.deadline = std::chrono::seconds(60)}));
  const int code = RUN_ALL_TESTS();
  fsdp::testing::job.reset();
  return code;
}
