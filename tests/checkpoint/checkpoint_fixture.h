// What the tests of checkpoints share: a folder of their own, runs on several layouts, all tensors of a checkpoint.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "fsdp/checkpoint/safetensors.h"
#include "fsdp/checkpoint/sharded_state.h"
#include "fsdp/checkpoint/tensor_index.h"
#include "fsdp/checkpoint/tensor_reader.h"
#include "tests/support/train.h"

namespace fsdp::testing {

namespace fs = std::filesystem;
using checkpoint::TensorIndex;
using checkpoint::TensorReader;
using ::testing::AllOf;
using ::testing::HasSubstr;

class CheckpointTest : public ::testing::Test {
 protected:
  CheckpointTest()
      : folder_(fs::temp_directory_path() / ("fsdp-checkpoint-" + std::to_string(getpid()) + "-" + name())) {
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }
  ~CheckpointTest() override { fs::remove_all(folder_); }
  static std::string name() { return ::testing::UnitTest::GetInstance()->current_test_info()->name(); }
  [[nodiscard]] fs::path in(const std::string& what) const { return folder_ / what; }

 private:
  fs::path folder_;
};

// Every tensor of a checkpoint, whole, in the order of its strides.
inline std::map<std::string, at::Tensor> everything_in(const fs::path& folder) {
  const auto index = TensorIndex::open(folder);
  TensorReader reader(index);
  std::map<std::string, at::Tensor> all;
  for (const auto& [key, stored] : index.tensors()) {
    at::Tensor whole = at::empty({stored.elements()}, checkpoint::dtype_of(stored.dtype));
    reader.read(key, {0, stored.elements()}, {static_cast<std::byte*>(whole.mutable_data_ptr()), whole.nbytes()});
    all.emplace(key, whole);
  }
  return all;
}

inline void expect_equal(const std::map<std::string, at::Tensor>& a, const std::map<std::string, at::Tensor>& b,
                         const std::string& what) {
  ASSERT_EQ(a.size(), b.size()) << what;
  for (const auto& [key, value] : a) {
    ASSERT_TRUE(b.contains(key)) << key << ' ' << what;
    EXPECT_TRUE(at::equal(value, b.at(key))) << key << ' ' << what;
  }
}

template <typename F>
std::string message_of(const F& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

struct Layout {
  int outer = 1, inner = 1;
  Strategy strategy = zero3({"outer", "inner"});
  [[nodiscard]] int ranks() const { return outer * inner; }
  [[nodiscard]] std::string describe() const {
    return strategy.name + " on " + std::to_string(outer) + " x " + std::to_string(inner);
  }
};

inline const std::vector<Layout>& layouts() {
  static const std::vector<Layout> all{{1, 1},
                                       {1, 2},
                                       {1, 3, zero2({"outer", "inner"})},
                                       {2, 2, zero3({"outer", "inner"})},
                                       {2, 2, hsdp("outer", "inner")},
                                       {2, 2, hfsdp("outer", "inner")},
                                       {1, 4, zero1({"outer", "inner"})},
                                       {1, 2, ddp({"outer", "inner"})}};
  return all;
}

// A rank of a run whose steps depend on their number alone, whatever the layout.
struct TestRun {
  TestRun(const World& world, const Layout& layout, bool adamw = true)
      : context(FsdpContext::create(DeviceMesh(world, {{"outer", layout.outer}, {"inner", layout.inner}}))),
        model(make_toy_model()) {
    shard_toy_model(*context, model, {.placements = layout.strategy});
    if (adamw)
      optimizer = std::make_unique<AdamW>(*context, AdamWOptions{.learning_rate = 0.01});
    else
      optimizer = std::make_unique<Sgd>(*context, SgdOptions{.learning_rate = 0.01, .momentum = 0.9});
  }
  void train(int first, int end) {
    for (int step = first; step < end; ++step) {
      toy_loss(model, 10 * static_cast<std::uint64_t>(step)).backward();
      optimizer->step(clip_grad_norm_(*context, 1.0));
      optimizer->zero_grad();
    }
  }
  std::shared_ptr<FsdpContext> context;
  ToyModel model;
  std::unique_ptr<ShardedOptimizer> optimizer;
};

inline void on(const Layout& layout, const std::function<void(World)>& body) {
  const auto rank_main = [&](World world) {
    at::set_num_threads(1);  // sums over several do not come out alike twice
    body(world);
  };
  run_ranks(layout.ranks(), rank_main, {.deadline = std::chrono::seconds(30)});
}

}  // namespace fsdp::testing
