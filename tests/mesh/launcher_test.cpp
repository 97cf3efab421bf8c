#include "fsdp/mesh/launcher.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/base/error.h"
#include "fsdp/mesh/world.h"

namespace fsdp::testing {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;

// The variables of a launcher, and no others.
class Environment {
 public:
  explicit Environment(std::vector<std::pair<const char*, const char*>> variables) {
    clear();
    for (const auto& [name, value] : variables) setenv(name, value, 1);
  }
  ~Environment() { clear(); }

 private:
  static void clear() {
    for (const char* name :
         {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_RANK",
          "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_PROCID",
          "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"})
      unsetenv(name);
  }
};

TEST(Launcher, ReadsTheVariablesOfEach) {
  {
    const Environment environment({{"RANK", "3"}, {"WORLD_SIZE", "8"}, {"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "2"}});
    const auto launcher = find_launcher();
    ASSERT_TRUE(launcher.has_value());
    EXPECT_EQ(launcher->name, "torchrun");
    EXPECT_EQ(launcher->rank, 3);
    EXPECT_EQ(launcher->size, 8);
    EXPECT_EQ(launcher->local_rank, 1);
    EXPECT_EQ(launcher->local_size, 2);
  }
  {
    const Environment environment({{"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "4"}, {"SLURM_LOCALID", "0"}});
    const auto launcher = find_launcher();
    ASSERT_TRUE(launcher.has_value());
    EXPECT_EQ(launcher->name, "srun");
    EXPECT_EQ(launcher->size, 4);
    EXPECT_EQ(launcher->local_size, 1);
  }
  const Environment environment({});
  EXPECT_FALSE(find_launcher().has_value());
}

TEST(Launcher, TheInnermostOneCounts) {
  {
    // mpirun inside an allocation of Slurm, with variables of torchrun's kind exported by a script.
    const Environment environment({{"OMPI_COMM_WORLD_RANK", "1"},
                                   {"OMPI_COMM_WORLD_SIZE", "2"},
                                   {"SLURM_PROCID", "0"},
                                   {"SLURM_STEP_NUM_TASKS", "1"},
                                   {"RANK", "5"},
                                   {"WORLD_SIZE", "6"}});
    EXPECT_EQ(find_launcher()->name, "mpirun");
    EXPECT_EQ(find_launcher()->rank, 1);
  }
  // torchrun started once a node by mpirun.
  const Environment environment({{"OMPI_COMM_WORLD_RANK", "1"},
                                 {"OMPI_COMM_WORLD_SIZE", "2"},
                                 {"TORCHELASTIC_RUN_ID", "none"},
                                 {"RANK", "5"},
                                 {"WORLD_SIZE", "6"}});
  EXPECT_EQ(find_launcher()->name, "torchrun");
  EXPECT_EQ(find_launcher()->rank, 5);
}

std::string refusal() {
  try {
    static_cast<void>(World::from_environment());
  } catch (const UsageError& error) {
    return error.what();
  }
  return "accepted";
}

TEST(Launcher, RefusesVariablesThatContradictEachOther) {
  {
    const Environment environment({{"RANK", "2"}, {"WORLD_SIZE", "2"}});
    EXPECT_THAT(refusal(), HasSubstr("torchrun set RANK=2 and WORLD_SIZE=2; expected a rank below the size"));
  }
  {
    const Environment environment({{"OMPI_COMM_WORLD_RANK", "x"}, {"OMPI_COMM_WORLD_SIZE", "2"}});
    EXPECT_THAT(refusal(), HasSubstr("environment variable OMPI_COMM_WORLD_RANK is \"x\", expected a whole number"));
  }
  {
    const Environment environment({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"TORCHELASTIC_RUN_ID", "none"}});
    EXPECT_THAT(refusal(), AnyOf(HasSubstr("MASTER_ADDR and MASTER_PORT"), HasSubstr("libfsdp_zeromq.so")));
  }
  const Environment environment({{"RANK", "0"}, {"WORLD_SIZE", "1"}});
  EXPECT_EQ(World::from_environment().size(), 1);
}

TEST(Launcher, AnUnboundProcessGetsItsShareOfTheCores) {
  Launcher launcher;
  launcher.local_size = 1;
  const int all = threads_per_process(launcher);
  EXPECT_GE(all, 1);
  launcher.local_size = 1000;
  EXPECT_LE(threads_per_process(launcher), all);
  EXPECT_GE(threads_per_process(launcher), 1);
}

}  // namespace
}  // namespace fsdp::testing
