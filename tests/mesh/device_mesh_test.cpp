#include "fsdp/mesh/device_mesh.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "fsdp/base/error.h"
#include "fsdp/mesh/run_ranks.h"
#include "fsdp/mesh/sub_mesh.h"
#include "fsdp/mesh/world.h"

namespace fsdp::testing {
namespace {

using ::testing::HasSubstr;

std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const UsageError& error) {
    return error.what();
  }
  return "accepted";
}

// The world ranks behind a communicator, by gathering them.
std::vector<std::int64_t> members(const Communicator& communicator, const World& world) {
  const Stream stream = world.runtime()->make_stream("probe");
  std::vector<std::int64_t> ranks(static_cast<std::size_t>(communicator.size()));
  const std::int64_t mine = world.rank().value();
  communicator.all_gather(&mine, ranks.data(), Elements(1), c10::kLong, stream, "ranks");
  stream.synchronize();
  return ranks;
}

TEST(DeviceMesh, LaysRanksOutRowMajorAndConnectsEveryAxis) {
  for (const auto& sizes : {std::vector<int>{1}, {4}, {2, 3}, {3, 2}, {1, 4}, {4, 1}, {2, 2, 2}, {2, 1, 3}}) {
    const int ranks = std::accumulate(sizes.begin(), sizes.end(), 1, std::multiplies<>());
    run_ranks(ranks, [&](World world) {
      std::vector<MeshAxis> axes;
      for (std::size_t axis = 0; axis < sizes.size(); ++axis)
        axes.push_back({"axis" + std::to_string(axis), sizes[axis]});
      const DeviceMesh mesh(world, axes);
      ASSERT_EQ(mesh.axis_count(), static_cast<int>(sizes.size()));
      const auto rank = static_cast<int>(world.rank().value());
      int stride = 1;
      for (int axis = mesh.axis_count(); axis-- > 0; stride *= sizes[axis]) {
        const int coordinate = rank / stride % sizes[axis];
        EXPECT_EQ(mesh.coordinate(axis), coordinate);
        EXPECT_EQ(mesh.axis(axis).size, sizes[axis]);
        std::vector<std::int64_t> expected;
        for (int c = 0; c < sizes[axis]; ++c) expected.push_back(rank + (c - coordinate) * stride);
        EXPECT_EQ(members(mesh.communicator(axis, Use::gather), world), expected);
        EXPECT_EQ(members(mesh.communicator(axis, Use::reduce), world), expected);
      }
    });
  }
}

TEST(DeviceMesh, NamesItsAxesAndTheirCommunicators) {
  run_ranks(6, [](World world) {
    const DeviceMesh mesh(world, {{"outer", 2}, {"inner", 3}});
    EXPECT_EQ(mesh.describe(), "outer=2 x inner=3");
    EXPECT_EQ(mesh.axis_index("outer"), 0);
    EXPECT_EQ(mesh.axis_index("inner"), 1);
    EXPECT_EQ(mesh.communicator(1, Use::gather).name(), "inner.gather");
    EXPECT_EQ(mesh.communicator(1, Use::reduce).name(), "inner.reduce");
    EXPECT_EQ(refusal([&] { (void)mesh.axis_index("expert"); }), "the mesh outer=2 x inner=3 has no axis \"expert\"");
  });
}

TEST(DeviceMesh, GathersAndReductionsOfAnAxisDoNotSerialise) {
  run_ranks(2,
            [](World world) {
              // Opposite orders on two streams: one communicator for both would pair a gather with a reduction.
              const DeviceMesh mesh(world, {{"dp", 2}});
              const Stream a = world.runtime()->make_stream("a"), b = world.runtime()->make_stream("b");
              const std::int64_t mine = world.rank().value() + 1;
              std::int64_t all[2] = {}, sum = 0;
              Event first;
              const auto gather = [&](const Stream& s) {
                mesh.communicator(0, Use::gather).all_gather(&mine, all, Elements(1), c10::kLong, s, "gather");
              };
              const auto reduce = [&](const Stream& s) {
                mesh.communicator(0, Use::reduce)
                    .all_reduce(&mine, &sum, Elements(1), c10::kLong, ReduceOp::sum, s, "reduce");
              };
              if (world.rank() == Rank(0)) {
                gather(a);
                reduce(b);
              } else {
                reduce(a);
                gather(b);
              }
              a.synchronize();
              b.synchronize();
              EXPECT_EQ(all[0] * 10 + all[1], 12);
              EXPECT_EQ(sum, 3);
            },
            {.deadline = std::chrono::seconds(10)});
}

TEST(DeviceMesh, RefusesSizesThatDoNotMultiplyToTheWorld) {
  const World world = World::simulated(6);
  const auto make = [&](std::vector<MeshAxis> axes) { return refusal([&] { (void)DeviceMesh(world, axes); }); };
  EXPECT_EQ(make({{"a", 2}, {"b", 2}}), "the mesh a=2 x b=2 has 4 places, the world has 6 ranks");
  EXPECT_EQ(make({{"a", 4}, {"b", 2}}), "the mesh a=4 x b=2 has more places than the world has ranks (6)");
  EXPECT_EQ(make({{"a", 1 << 30}, {"b", 1 << 30}, {"c", 1 << 30}}),
            "the mesh a=1073741824 x b=1073741824 x c=1073741824 has more places than the world has ranks (6)");
  EXPECT_EQ(make({{"a", 6}, {"b", 0}}), "axis \"b\" of the mesh has size 0, expected at least 1");
  EXPECT_EQ(make({{"a", -2}, {"b", -3}}), "axis \"a\" of the mesh has size -2, expected at least 1");
  EXPECT_EQ(make({{"a", 2}, {"b", 3}}), "accepted");
}

TEST(DeviceMesh, RefusesMissingAndRepeatedNames) {
  const World world = World::simulated(4);
  const auto make = [&](std::vector<MeshAxis> axes) { return refusal([&] { (void)DeviceMesh(world, axes); }); };
  EXPECT_EQ(make({}), "a mesh needs at least one axis");
  EXPECT_EQ(make({{"a", 2}, {"", 2}}), "axis 1 of the mesh a=2 x =2 has no name");
  EXPECT_EQ(make({{"a", 2}, {"a", 2}}), "the mesh a=2 x a=2 has two axes named \"a\"");
}

TEST(DeviceMesh, CanBeBuiltOverCommunicatorsOfTheCaller) {
  run_ranks(4, [](World world) {
    const int rank = static_cast<int>(world.rank().value());
    const std::vector<int> pair = {rank / 2 * 2, rank / 2 * 2 + 1};
    const Communicator gather = world.create_communicator(pair, "my gather"),
                       reduce = world.create_communicator(pair, "my reduce");
    const DeviceMesh mesh(world, {"pair"}, {{gather, reduce}});
    EXPECT_EQ(mesh.describe(), "pair=2");
    EXPECT_EQ(mesh.coordinate(0), rank % 2);
    EXPECT_EQ(mesh.communicator(0, Use::gather).name(), "my gather");
    EXPECT_EQ(members(mesh.communicator(0, Use::reduce), world), (std::vector<std::int64_t>{pair[0], pair[1]}));
  });
}

TEST(DeviceMesh, RefusesCommunicatorsThatDoNotFitTogether) {
  const World world = World::simulated(4);
  const Communicator four = world.create_communicator(std::vector<int>{0, 1, 2, 3}, "four"),
                     two = world.create_communicator(std::vector<int>{0, 1}, "two");
  const auto make = [&](std::vector<std::string> names, std::vector<DeviceMesh::AxisCommunicators> pairs) {
    return refusal([&] { (void)DeviceMesh(world, names, pairs); });
  };
  EXPECT_EQ(make({"a", "b"}, {{four, four}}), "expected one pair of communicators per axis: 2 axes, 1 pairs");
  EXPECT_EQ(make({"a"}, {{four, Communicator()}}), "axis \"a\": both communicators must be created");
  EXPECT_EQ(make({"a"}, {{four, two}}),
            "axis \"a\": the gather communicator has rank 0 of 4, the reduce communicator rank 0 of 2");
  EXPECT_EQ(make({"a", "a"}, {{four, four}, {two, two}}), "the mesh a=4 x a=2 has two axes named \"a\"");
}

TEST(SubMesh, TakesItsAxesInTheStrategysOrder) {
  run_ranks(6, [](World world) {
    const DeviceMesh mesh(world, {{"outer", 2}, {"inner", 3}});
    const SubMesh reversed(mesh, {"inner", "outer"}), one(mesh, {"outer"});
    const int rank = static_cast<int>(world.rank().value());
    EXPECT_EQ(reversed.sizes(), (std::vector<int>{3, 2}));
    EXPECT_EQ(reversed.coordinates(), (std::vector<int>{rank % 3, rank / 3}));
    EXPECT_EQ(reversed.rank_count(), 6);
    EXPECT_EQ(reversed.communicator(0, Use::gather).name(), "inner.gather");
    EXPECT_EQ(one.rank_count(), 2);
    EXPECT_THAT(refusal([&] { SubMesh(mesh, {"dp"}); }), HasSubstr("has no axis \"dp\""));
  });
}

TEST(World, SingleIsOneRankWithWorkingCommunicators) {
  const World world = World::single();
  EXPECT_EQ(world.rank(), Rank(0));
  EXPECT_EQ(world.size(), 1);
  EXPECT_EQ(world.backend_name(), "single");
  EXPECT_EQ(members(DeviceMesh(world, {{"dp", 1}}).communicator(0, Use::gather), world),
            (std::vector<std::int64_t>{0}));
}

TEST(World, RefusesGroupsWithoutThisRankOrOutOfOrder) {
  const World world = World::simulated(4);
  EXPECT_EQ(refusal([&] {
              (void)world.create_communicator(std::vector<int>{1, 2}, "g");
            }),
            "communicator g: rank 0 is not among its ranks");
  EXPECT_EQ(refusal([&] {
              (void)world.create_communicator(std::vector<int>{1, 0}, "g");
            }),
            "communicator g: expected ascending ranks");
  EXPECT_EQ(refusal([&] { (void)World::simulated(0); }), "a simulated world needs at least 1 rank, got 0");
}

class WorldFromEnvironment : public ::testing::Test {
 protected:
  static constexpr const char* kNames[] = {
      "RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"};
  void SetUp() override { clear(); }
  void TearDown() override { clear(); }
  static void clear() {
    for (const char* name : kNames) unsetenv(name);
  }
  static std::string join(const char* rank_name, const char* rank, const char* size_name, const char* size) {
    clear();
    setenv(rank_name, rank, 1);
    setenv(size_name, size, 1);
    return refusal([] { EXPECT_EQ(World::from_environment().size(), 1); });
  }
};

TEST_F(WorldFromEnvironment, IsOneRankWithoutALauncher) {
  EXPECT_EQ(World::from_environment().size(), 1);
  setenv("WORLD_SIZE", "4", 1);
  EXPECT_THAT(refusal([] { (void)World::from_environment(); }),
              HasSubstr("WORLD_SIZE is set, but RANK is not: set both, as torchrun does, or neither"));
}

TEST_F(WorldFromEnvironment, AcceptsALaunchOfOneProcess) {
  EXPECT_EQ(join("RANK", "0", "WORLD_SIZE", "1"), "accepted");
  EXPECT_EQ(join("OMPI_COMM_WORLD_RANK", "0", "OMPI_COMM_WORLD_SIZE", "1"), "accepted");
  EXPECT_EQ(join("SLURM_PROCID", "0", "SLURM_STEP_NUM_TASKS", "1"), "accepted");
}

TEST_F(WorldFromEnvironment, RefusesImpossibleValues) {
  EXPECT_EQ(join("RANK", "4", "WORLD_SIZE", "4"),
            "torchrun set RANK=4 and WORLD_SIZE=4; expected a rank below the size");
  EXPECT_EQ(join("RANK", "-1", "WORLD_SIZE", "1"),
            "torchrun set RANK=-1 and WORLD_SIZE=1; expected a rank below the size");
  EXPECT_EQ(join("RANK", "0", "WORLD_SIZE", "0"),
            "torchrun set RANK=0 and WORLD_SIZE=0; expected a rank below the size");
  EXPECT_EQ(join("RANK", "zero", "WORLD_SIZE", "1"), "environment variable RANK is \"zero\", expected a whole number");
}

}  // namespace
}  // namespace fsdp::testing
