// What fails on one rank fails on all and leaves the old checkpoint; what is damaged or does not fit is named.
#include "tests/checkpoint/checkpoint_fixture.h"

namespace fsdp::testing {
namespace {

TEST_F(CheckpointTest, AFailureOfOneRankIsOneOfAllAndLeavesTheOldCheckpoint) {
  const Layout layout{1, 3};
  std::vector<std::string> messages(3);
  on(layout, [&](World world) {
    TestRun run(world, layout);
    Checkpoint checkpoint(*run.context, run.optimizer.get());
    checkpoint.save(in("old"));
    run.train(0, 1);
    // Rank 1 alone has something that no file can hold.
    if (world.rank() == Rank(1)) checkpoint.add_tensor("odd", at::zeros({2}, at::kComplexFloat));
    messages[world.rank().value()] = message_of([&] { checkpoint.save(in("old")); });
  });
  EXPECT_THAT(messages[1], AllOf(HasSubstr("tensors/odd"), HasSubstr("ComplexFloat")));
  for (const int rank : {0, 2})
    EXPECT_THAT(messages[rank], AllOf(HasSubstr("rank 1 failed"), HasSubstr("tensors/odd")));
  EXPECT_FALSE(fs::exists(in("old.part")));
  on({}, [&](World world) {
    TestRun run(world, {});
    static_cast<void>(Checkpoint(*run.context, run.optimizer.get()).load(in("old")));
    EXPECT_TRUE(at::equal(run.context->full_parameter("exit.weight"), make_toy_model()->exit->weight));
  });
}

TEST_F(CheckpointTest, DamageIsNamed) {
  const Layout layout{1, 2};
  const auto save = [&] {
    on(layout, [&](World world) {
      TestRun run(world, layout);
      Checkpoint(*run.context, run.optimizer.get()).save(in("c"));
    });
  };
  // What every rank says of it.
  const auto load = [&] {
    std::vector<std::string> messages(2);
    on(layout, [&](World world) {
      TestRun run(world, layout);
      messages[world.rank().value()] =
          message_of([&] { static_cast<void>(Checkpoint(*run.context, run.optimizer.get()).load(in("c"))); });
    });
    return messages;
  };
  const auto second = in("c") / "rank-00001.safetensors";

  save();
  {
    std::fstream file(second, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(-3, std::ios::end);
    const char flipped = static_cast<char>(file.peek() ^ 1);
    file.seekp(-3, std::ios::end);
    file.put(flipped);
  }
  for (const auto& message : load()) EXPECT_THAT(message, AllOf(HasSubstr("rank-00001"), HasSubstr("checksum")));

  save();
  fs::resize_file(second, fs::file_size(second) - 1);
  for (const auto& message : load()) EXPECT_THAT(message, AllOf(HasSubstr("rank-00001"), HasSubstr("cut short")));

  save();
  fs::remove(second);
  for (const auto& message : load()) EXPECT_THAT(message, AllOf(HasSubstr("rank-00001"), HasSubstr("is missing")));

  save();
  fs::remove(in("c") / "index.json");
  for (const auto& message : load())
    EXPECT_THAT(message, AllOf(HasSubstr("is no checkpoint"), HasSubstr("index.json")));

  // A piece that the index has lost.
  fs::remove_all(in("c"));
  save();
  nlohmann::json index;
  std::ifstream(in("c") / "index.json") >> index;
  index["tensors"]["weights/blocks.1.up.weight"]["pieces"].erase(0);
  std::ofstream(in("c") / "index.json") << index;
  for (const auto& message : load())
    EXPECT_THAT(message, AllOf(HasSubstr("weights/blocks.1.up.weight"), HasSubstr("lacks")));

  index["version"] = 7;
  std::ofstream(in("c") / "index.json") << index;
  for (const auto& message : load()) EXPECT_THAT(message, HasSubstr("version 7"));
  EXPECT_THAT(message_of([&] { static_cast<void>(TensorIndex::open(in("nowhere"))); }),
              HasSubstr("there is no checkpoint"));
}

TEST_F(CheckpointTest, WhatDoesNotFitIsRefusedBeforeAnythingChanges) {
  const Layout layout{1, 2};
  on(layout, [&](World world) {
    TestRun run(world, layout);
    run.train(0, 2);
    Checkpoint(*run.context, run.optimizer.get()).save(in("seven"));
  });
  const auto refusal = [&](std::int64_t width, int depth, bool adamw, const LoadOptions& options = {}) {
    std::vector<std::string> messages(2);
    on(layout, [&](World world) {
      auto context = FsdpContext::create(DeviceMesh(world, {{"dp", 2}}));
      auto model = make_toy_model(width, depth);
      shard_toy_model(*context, model, {});
      const auto before = context->full_parameter("entry.weight");
      std::unique_ptr<ShardedOptimizer> optimizer;
      if (adamw)
        optimizer = std::make_unique<AdamW>(*context);
      else
        optimizer = std::make_unique<Sgd>(*context, SgdOptions{.momentum = 0.5});
      Checkpoint checkpoint(*context, optimizer.get());
      messages[world.rank().value()] = message_of([&] { static_cast<void>(checkpoint.load(in("seven"), options)); });
      EXPECT_TRUE(at::equal(context->full_parameter("entry.weight"), before));
    });
    EXPECT_THAT(messages[1], HasSubstr(messages[0].substr(0, 40)));
    return messages[0];
  };
  EXPECT_THAT(refusal(8, 3, true), AllOf(HasSubstr("has sizes"), HasSubstr("(8"), HasSubstr("(7")));
  EXPECT_THAT(refusal(7, 4, true), AllOf(HasSubstr("lacks"), HasSubstr("blocks.3.")));
  EXPECT_THAT(refusal(7, 2, true), AllOf(HasSubstr("that the model lacks"), HasSubstr("blocks.2.")));
  EXPECT_THAT(refusal(7, 3, false), AllOf(HasSubstr("exp_avg, exp_avg_sq"), HasSubstr("momentum_buffer")));
  EXPECT_THAT(refusal(8, 3, false, {.optimizer = false}), HasSubstr("has sizes"));
  on(layout, [&](World world) {
    TestRun run(world, layout);
    Checkpoint(*run.context).save(in("weights alone"));
    EXPECT_THAT(
        message_of([&] { static_cast<void>(Checkpoint(*run.context, run.optimizer.get()).load(in("weights alone"))); }),
        HasSubstr("without an optimizer"));
    // Half a step's gradients would be lost.
    {
      auto scope = run.context->no_sync();
      toy_loss(run.model, 1).backward();
    }
    EXPECT_THAT(message_of([&] { Checkpoint(*run.context).save(in("middle")); }), HasSubstr("saving a checkpoint"));
  });
  fs::create_directories(in("other"));
  std::ofstream(in("other") / "precious.txt") << "x";
  on(layout, [&](World world) {
    TestRun run(world, layout);
    EXPECT_THAT(message_of([&] { Checkpoint(*run.context).save(in("other")); }),
                HasSubstr("is no checkpoint: it is not replaced"));
  });
  EXPECT_TRUE(fs::exists(in("other") / "precious.txt"));
}

TEST_F(CheckpointTest, NotStrictLoadsWhatIsThereAndListsTheRest) {
  on({1, 2}, [&](World world) {
    auto context = FsdpContext::create(DeviceMesh(world, {{"dp", 2}}));
    auto model = make_toy_model(7, 2);
    shard_toy_model(*context, model, {});
    Checkpoint(*context).save(in("two blocks"));
  });
  on({1, 2}, [&](World world) {
    TestRun run(world, {1, 2});
    run.train(0, 1);
    const auto kept = run.context->full_parameter("blocks.2.up.weight");
    const auto result = Checkpoint(*run.context).load(in("two blocks"), {.optimizer = false, .strict = false});
    EXPECT_THAT(result.missing, ::testing::Contains("blocks.2.up.weight"));
    EXPECT_TRUE(result.unused.empty());
    EXPECT_TRUE(at::equal(run.context->full_parameter("blocks.2.up.weight"), kept));
    EXPECT_TRUE(at::equal(run.context->full_parameter("exit.weight"), make_toy_model(7, 2)->exit->weight));
  });
}

}  // namespace
}  // namespace fsdp::testing
