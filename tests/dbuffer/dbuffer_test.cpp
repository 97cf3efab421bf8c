#include "fsdp/dbuffer/dbuffer.h"

#include <ATen/Functions.h>
#include <c10/core/CPUAllocator.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "fsdp/base/error.h"
#include "fsdp/dbuffer/buffer_pool.h"
#include "fsdp/dbuffer/flat_storage.h"
#include "fsdp/dbuffer/redistribute.h"
#include "fsdp/layout/transition.h"
#include "fsdp/mesh/run_ranks.h"

namespace fsdp::testing {
namespace {

using enum Placement;
using ::testing::HasSubstr;

constexpr const char* kReleased = "weight \"layers.0.w\" is resharded: read it inside its unit's forward";

c10::DataPtr floats(const std::vector<float>& values) {
  auto data = c10::GetCPUAllocator()->allocate(values.size() * sizeof(float));
  std::copy(values.begin(), values.end(), static_cast<float*>(data.get()));
  return data;
}

class FlatStorageTest : public ::testing::Test {
 protected:
  FlatStorage storage_{c10::kCPU, Bytes(64 * sizeof(float)), kReleased};
  std::vector<float> ramp_ = [] {
    std::vector<float> values(64);
    std::iota(values.begin(), values.end(), 0.0f);
    return values;
  }();
};

TEST_F(FlatStorageTest, ViewsFollowTheDataToAnotherAddress) {
  storage_.attach(floats(ramp_));
  const at::Tensor matrix = storage_.view(c10::kFloat, 8, {2, 3}, {3, 1});
  const at::Tensor transposed = storage_.view(c10::kFloat, 8, {3, 2}, {1, 3});
  const at::Tensor derived = matrix.select(0, 1);  // as autograd would keep it
  EXPECT_EQ(matrix[1][2].item<float>(), 13);
  EXPECT_TRUE(at::equal(transposed, matrix.t()));
  const void* old_address = storage_.data();
  const c10::DataPtr kept = storage_.detach();
  EXPECT_EQ(kept.get(), old_address);
  EXPECT_FALSE(storage_.attached());
  EXPECT_EQ(storage_.data(), nullptr);
  for (float& value : ramp_) value += 100;
  storage_.attach(floats(ramp_));  // `kept` is alive: another address for sure
  EXPECT_NE(storage_.data(), old_address);
  EXPECT_EQ(matrix.const_data_ptr(), static_cast<const float*>(storage_.data()) + 8);
  EXPECT_EQ(matrix[1][2].item<float>(), 113);
  EXPECT_EQ(derived[0].item<float>(), 111);
}

TEST_F(FlatStorageTest, ViewsShareOneStorageAndWritesOfOneShowInOthers) {
  storage_.attach(floats(ramp_));
  const at::Tensor a = storage_.view(c10::kFloat, 0, 10), b = storage_.view(c10::kFloat, 5, 10);
  EXPECT_EQ(a.storage().unsafeGetStorageImpl(), b.storage().unsafeGetStorageImpl());
  a.fill_(-1);
  EXPECT_EQ(b[4].item<float>(), -1);
  EXPECT_EQ(b[5].item<float>(), 10);
}

TEST_F(FlatStorageTest, AttachAndDetachDoNotMoveVersionCounters) {
  const at::Tensor view = storage_.view(c10::kFloat, 0, 16);
  const auto version = view._version();
  for (int i = 0; i < 3; ++i) {
    storage_.attach(floats(ramp_));
    EXPECT_EQ(view.sum().item<float>(), 120);
    (void)storage_.detach();
  }
  EXPECT_EQ(view._version(), version);
  storage_.attach(floats(ramp_));
  view.mul_(2);
  EXPECT_EQ(view._version(), version + 1) << "a real change is seen";
}

TEST_F(FlatStorageTest, EveryReadWhileReleasedThrowsItsMessageAndWorksAgainOnceAttached) {
  const at::Tensor vector = storage_.view(c10::kFloat, 0, 8), matrix = storage_.view(c10::kFloat, 0, {8, 8}, {8, 1});
  const at::Tensor input = at::ones({8, 8}), indices = at::arange(8, at::kLong);
  const std::vector<std::pair<const char*, std::function<at::Tensor()>>> reads = {
      {"add", [&] { return input.add(matrix); }},
      {"mm", [&] { return input.mm(matrix); }},
      {"mv", [&] { return matrix.mv(at::ones(8)); }},
      {"sum", [&] { return matrix.sum(); }},
      {"copy_",
       [&] {
         return at::empty({8, 8}).copy_(matrix);
       }},
      {"clone", [&] { return matrix.t().clone(); }},
      {"layer_norm", [&] { return at::layer_norm(input, {8}, vector, vector); }},
      {"embedding", [&] { return at::embedding(matrix, indices); }},
      {"linear", [&] { return at::linear(input, matrix, vector); }},
      {"fill_", [&] { return vector.fill_(1); }},
      {"item", [&] { return at::scalar_tensor(vector[3].item<float>()); }},
  };
  for (int round = 0; round < 2; ++round) {  // never attached, then released again
    for (const auto& [name, read] : reads) {
      try {
        (void)read();
        ADD_FAILURE() << name << " read a released weight, round " << round;
      } catch (const std::exception& error) {
        EXPECT_THAT(error.what(), HasSubstr(kReleased)) << name;
      }
    }
    storage_.attach(floats(ramp_));
    for (const auto& [name, read] : reads) EXPECT_NO_THROW((void)read()) << name;
    (void)storage_.detach();
  }
}

TEST_F(FlatStorageTest, TheMessageCanBeMadeMorePrecise) {
  const at::Tensor view = storage_.view(c10::kFloat, 0, 8);
  storage_.set_released_message("unit layers.7 is resharded");
  EXPECT_THAT([&] { (void)view.sum(); }, ::testing::ThrowsMessage<c10::Error>(HasSubstr("unit layers.7 is resharded")));
}

TEST(FlatStorageOnMeta, HasNothingToReadAndNeverThrows) {
  FlatStorage storage(c10::kMeta, Bytes(64), kReleased);
  const at::Tensor view = storage.view(c10::kFloat, 0, 16);
  EXPECT_NO_THROW((void)view.add(view));
  storage.attach({nullptr, c10::kMeta});
  EXPECT_TRUE(storage.attached());
  (void)storage.detach();
  EXPECT_FALSE(storage.attached());
  EXPECT_NO_THROW((void)view.add(view));
}

TEST(BufferPool, ReusesBuffersOfTheSameSizeOnly) {
  BufferPool pool(make_cpu_runtime());
  auto a = pool.acquire(Bytes(1024));
  const void* address = a.get();
  pool.release(std::move(a), Bytes(1024));
  auto other = pool.acquire(Bytes(2048));
  EXPECT_NE(other.get(), address);
  auto again = pool.acquire(Bytes(1024));
  EXPECT_EQ(again.get(), address);
  EXPECT_EQ(pool.reserved(), Bytes(3072));
  auto second = pool.acquire(Bytes(1024));
  EXPECT_NE(second.get(), address);
  EXPECT_EQ(pool.reserved(), Bytes(4096));
}

TEST(BufferPool, KeepsItsBooks) {
  BufferPool pool(make_cpu_runtime());
  auto a = pool.acquire(Bytes(100)), b = pool.acquire(Bytes(200));
  EXPECT_EQ(pool.in_use(), Bytes(300));
  EXPECT_EQ(pool.live(), 2);
  pool.release(std::move(a), Bytes(100));
  EXPECT_EQ(pool.in_use(), Bytes(200));
  EXPECT_EQ(pool.live(), 1);
  EXPECT_EQ(pool.peak(), Bytes(300));
  EXPECT_EQ(pool.peak_live(), 2);
  EXPECT_EQ(pool.reserved(), Bytes(300));
  pool.trim();
  EXPECT_EQ(pool.reserved(), Bytes(200)) << "what is in use stays";
  pool.reset_peak();
  EXPECT_EQ(pool.peak(), Bytes(200));
  EXPECT_EQ(pool.peak_live(), 1);
  pool.release(std::move(b), Bytes(200));
  EXPECT_EQ(pool.in_use(), Bytes(0));
  pool.trim();
  EXPECT_EQ(pool.reserved(), Bytes(0));
}

TEST(BufferPool, CountsBorrowedMemoryAndDoesNotKeepIt) {
  BufferPool pool(make_cpu_runtime());
  std::byte memory[64];
  {
    const c10::DataPtr lent = pool.borrow(memory, Bytes(64));
    EXPECT_EQ(lent.get(), memory);
    EXPECT_EQ(pool.in_use(), Bytes(64));
    EXPECT_EQ(pool.live(), 1);
  }
  pool.end_of_loan(Bytes(64));
  EXPECT_EQ(pool.in_use(), Bytes(0));
  EXPECT_EQ(pool.live(), 0);
  EXPECT_EQ(pool.peak(), Bytes(64));
  EXPECT_EQ(pool.reserved(), Bytes(0));
  EXPECT_NE(pool.acquire(Bytes(64)).get(), memory);
}

TEST(BufferPool, AdoptsABufferFromAnotherPoolsBooks) {
  BufferPool from(make_cpu_runtime()), to(make_cpu_runtime());
  auto buffer = from.acquire(Bytes(64));
  to.adopt_from(from, Bytes(64));
  EXPECT_EQ(from.in_use(), Bytes(0));
  EXPECT_EQ(from.reserved(), Bytes(0));
  EXPECT_EQ(from.live(), 0);
  EXPECT_EQ(to.in_use(), Bytes(64));
  EXPECT_EQ(to.peak(), Bytes(64));
  EXPECT_EQ(to.live(), 1);
  const void* address = buffer.get();
  to.release(std::move(buffer), Bytes(64));
  EXPECT_EQ(to.acquire(Bytes(64)).get(), address);
}

// ---- Redistribution against brute force, over real ranks.

const std::vector<std::vector<int>>& meshes() {
  static const std::vector<std::vector<int>> list = {{1}, {2}, {3}, {4}, {1, 2}, {2, 1}, {2, 2}, {1, 4}, {4, 1}};
  return list;
}

const std::vector<std::int64_t> kTensors = {3, 0, 129, 1, 400};

std::vector<PlacementList> all_placements(std::size_t axes) {
  if (axes == 0) return {{}};
  std::vector<PlacementList> lists;
  for (const auto& shorter : all_placements(axes - 1)) {
    for (Placement placement : {replicate, partial, flat}) {
      lists.push_back(shorter);
      lists.back().push_back(placement);
    }
  }
  return lists;
}

// The planned steps if all of them are of the given kinds; nothing when refused or of another kind.
bool leads_by(const PlacementList& from, const PlacementList& to, std::vector<Transition> allowed) {
  try {
    for (const auto& step : plan_redistribution(from, to)) {
      if (std::find(allowed.begin(), allowed.end(), step.transition) == allowed.end()) return false;
    }
    return true;
  } catch (const UsageError&) {
    return false;
  }
}

float weight(std::int64_t coordinate) { return static_cast<float>(coordinate % 1009) - 500.0f; }

struct Place {
  std::shared_ptr<const SubMesh> mesh;
  std::shared_ptr<const GlobalLayout> layout;
  Stream stream;

  Place(const World& world, const std::vector<int>& sizes) {
    std::vector<MeshAxis> axes;
    std::vector<std::string> names;
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      names.push_back("axis" + std::to_string(i));
      axes.push_back({names.back(), sizes[i]});
    }
    mesh = std::make_shared<SubMesh>(DeviceMesh(world, axes), names);
    layout = std::make_shared<GlobalLayout>(kTensors, world.size());
    stream = world.runtime()->make_stream("s");
  }

  [[nodiscard]] DBuffer buffer(PlacementList placements) const {
    return {mesh, layout, std::move(placements), c10::kFloat, kReleased};
  }
};

void fill(const DBuffer& buffer, const std::function<float(std::int64_t)>& value) {
  for (auto i = buffer.range().begin; i < buffer.range().end; ++i) *static_cast<float*>(buffer.address(i)) = value(i);
}

// The first packed coordinate in the range that does not hold what it should, or -1.
std::int64_t first_wrong(const DBuffer& buffer, ElementRange range, const std::function<float(std::int64_t)>& value) {
  for (auto i = range.begin; i < range.end; ++i) {
    if (*static_cast<const float*>(buffer.address(i)) != value(i)) return i;
  }
  return -1;
}

TEST(Gather, FillsEveryPlacementItCanReach) {
  for (const auto& sizes : meshes()) {
    run_ranks(std::accumulate(sizes.begin(), sizes.end(), 1, std::multiplies<>()), [&](World world) {
      const Place place(world, sizes);
      int reached = 0;
      for (const auto& from_placements : all_placements(sizes.size())) {
        for (const auto& to_placements : all_placements(sizes.size())) {
          if (!leads_by(from_placements, to_placements, {Transition::all_gather, Transition::slice})) continue;
          ++reached;
          DBuffer from = place.buffer(from_placements), to = place.buffer(to_placements);
          from.allocate();
          to.allocate();
          fill(from, weight);
          fill(to, [](std::int64_t) { return NAN; });
          gather(from, to, place.stream, "unshard");
          place.stream.synchronize();
          EXPECT_EQ(first_wrong(to, to.range(), weight), -1)
              << to_string(from_placements) << " to " << to_string(to_placements);
          EXPECT_EQ(first_wrong(from, from.range(), weight), -1) << "the source changed";
        }
      }
      EXPECT_GE(reached, sizes.size() == 1 ? 5 : 20);
    });
  }
}

TEST(Gather, WorksInPlaceFromAPartOfItsTarget) {
  for (const auto& sizes : meshes()) {
    run_ranks(std::accumulate(sizes.begin(), sizes.end(), 1, std::multiplies<>()), [&](World world) {
      const Place place(world, sizes);
      DBuffer whole = place.buffer(PlacementList(sizes.size(), replicate));
      whole.allocate();
      const DBuffer part = DBuffer::part_of(whole, PlacementList(sizes.size(), flat));
      EXPECT_EQ(part.address(part.range().begin), whole.address(part.range().begin));
      EXPECT_EQ(part.range().length() * world.size(), whole.range().length());
      fill(whole, [](std::int64_t) { return NAN; });
      fill(part, weight);
      gather(part, whole, place.stream, "unshard");
      place.stream.synchronize();
      EXPECT_EQ(first_wrong(whole, whole.range(), weight), -1);
    });
  }
}

TEST(ReduceInPlace, LeavesTheSumOverThePartialAxesInTheReturnedRange) {
  for (const auto& sizes : meshes()) {
    const int ranks = std::accumulate(sizes.begin(), sizes.end(), 1, std::multiplies<>());
    run_ranks(ranks, [&](World world) {
      const Place place(world, sizes);
      const int me = static_cast<int>(world.rank().value());
      const auto coordinate = [&](int rank, std::size_t axis) {
        for (std::size_t later = sizes.size() - 1; later > axis; --later) rank /= sizes[later];
        return rank % sizes[axis];
      };
      int reached = 0;
      for (const auto& from : all_placements(sizes.size())) {
        for (const auto& to : all_placements(sizes.size())) {
          if (!leads_by(from, to, {Transition::reduce_scatter, Transition::all_reduce})) continue;
          ++reached;
          DBuffer buffer = place.buffer(from);
          buffer.allocate();
          // A value of (rank, coordinate); replicas on axes that are not summed may differ, so mistaken partners show.
          const auto value = [](int rank, std::int64_t i) { return weight(i) + static_cast<float>(1000 * (rank + 1)); };
          fill(buffer, [&](std::int64_t i) { return value(me, i); });
          const ElementRange range = reduce_in_place(buffer, to, place.stream, "reduce").range;
          place.stream.synchronize();
          EXPECT_EQ(range, place.layout->shard(to, place.mesh->sizes(), place.mesh->coordinates()));
          const auto sum = [&](std::int64_t i) {
            float total = 0;
            for (int rank = 0; rank < ranks; ++rank) {
              bool partner = true;
              for (std::size_t axis = 0; axis < sizes.size(); ++axis) {
                const bool summed = from[axis] == partial && to[axis] != partial;
                partner = partner && (summed || coordinate(rank, axis) == coordinate(me, axis));
              }
              if (partner) total += value(rank, i);
            }
            return total;
          };
          EXPECT_EQ(first_wrong(buffer, range, sum), -1) << to_string(from) << " to " << to_string(to);
        }
      }
      EXPECT_GE(reached, sizes.size() == 1 ? 5 : 20);
    });
  }
}

TEST(DBuffer, GivesTensorsTheirShapesAndPiecesTheirPlace) {
  run_ranks(3, [](World world) {
    const Place place(world, {3});
    DBuffer whole = place.buffer({replicate});
    EXPECT_THAT([&] { (void)whole.flat().sum(); }, ::testing::ThrowsMessage<c10::Error>(HasSubstr(kReleased)));
    whole.allocate();
    EXPECT_EQ(whole.flat().sum().item<float>(), 0) << "allocated memory is zero";
    fill(whole, weight);
    const at::Tensor matrix = whole.tensor(4, {20, 20}, {1, 20});  // transposed strides stay
    const auto begin = place.layout->tensors()[4].begin;
    EXPECT_EQ(matrix[3][2].item<float>(), weight(begin + 3 + 2 * 20));
    EXPECT_EQ(whole.tensor(1, {0, 7}, {7, 1}).numel(), 0);
    EXPECT_EQ(whole.tensor(3, {}, {}).item<float>(), weight(place.layout->tensors()[3].begin));
    const DBuffer share = place.buffer({flat});
    std::int64_t held = 0;
    for (int t = 0; t < static_cast<int>(kTensors.size()); ++t) {
      const ElementRange piece = share.piece(t);
      held += piece.length();
      EXPECT_EQ(piece, intersect(share.range(), place.layout->tensors()[t]));
    }
    std::int64_t total = held;
    place.mesh->communicator(0, Use::reduce)
        .all_reduce(&held, &total, Elements(1), c10::kLong, ReduceOp::sum, place.stream, "count");
    place.stream.synchronize();
    EXPECT_EQ(total, 3 + 0 + 129 + 1 + 400) << "every element lies on one rank";
  });
}

TEST(DBuffer, OnMetaHasNoDataAndStillKnowsItsSize) {
  const World world = World::simulated(8);
  const Place place(world, {8});
  DBuffer buffer = place.buffer({flat});
  buffer.allocate();
  EXPECT_EQ(buffer.address(buffer.range().begin), nullptr);
  EXPECT_EQ(buffer.size().value(), buffer.range().length() * 4);
  EXPECT_TRUE(buffer.flat().is_meta());
  DBuffer whole = place.buffer({replicate});
  whole.allocate();
  const auto before = place.stream.now();
  gather(buffer, whole, place.stream, "unshard");
  EXPECT_GT(place.stream.now(), before);
}

}  // namespace
}  // namespace fsdp::testing
