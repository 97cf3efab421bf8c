// Runs that stop and go on: on the same ranks bit for bit, on others with the same state.
#include "tests/checkpoint/checkpoint_fixture.h"

namespace fsdp::testing {
namespace {

TEST_F(CheckpointTest, ARunThatGoesOnEqualsOneThatNeverStoppedBitForBit) {
  for (const bool adamw : {true, false}) {
    for (const Layout& layout : layouts()) {
      on(layout, [&](World world) {
        TestRun run(world, layout, adamw);
        Checkpoint checkpoint(*run.context, run.optimizer.get());
        run.train(0, 3);
        checkpoint.save(in("three"), {{"step", "3"}});
        run.train(3, 6);
        checkpoint.save(in("six"));
      });
      on(layout, [&](World world) {
        TestRun run(world, layout, adamw);
        run.train(0, 1);  // state that loading must replace
        Checkpoint checkpoint(*run.context, run.optimizer.get());
        const auto loaded = checkpoint.load(in("three"));
        EXPECT_EQ(loaded.attributes.at("step"), "3");
        EXPECT_EQ(loaded.ranks, layout.ranks());
        EXPECT_TRUE(loaded.missing.empty() && loaded.unused.empty() && loaded.fresh.empty());
        run.train(3, 6);
        checkpoint.save(in("again"));
      });
      expect_equal(everything_in(in("six")), everything_in(in("again")), layout.describe());
      EXPECT_FALSE(at::equal(everything_in(in("three")).at("weights/blocks.1.up.weight"),
                             everything_in(in("six")).at("weights/blocks.1.up.weight")));
    }
  }
}

TEST_F(CheckpointTest, AnyLayoutLoadsWhatAnyOtherSaved) {
  for (const Layout& from : layouts()) {
    on(from, [&](World world) {
      TestRun run(world, from);
      run.train(0, 3);
      Checkpoint(*run.context, run.optimizer.get()).save(in("saved"));
    });
    const auto saved = everything_in(in("saved"));
    for (const Layout& to : layouts()) {
      on(to, [&](World world) {
        TestRun run(world, to);
        Checkpoint checkpoint(*run.context, run.optimizer.get());
        static_cast<void>(checkpoint.load(in("saved")));
        // What the model computes with, not only what lies in the shards.
        const auto weight = saved.at("weights/exit.weight").view({3, 7});
        EXPECT_TRUE(at::equal(run.context->full_parameter("exit.weight"), weight));
        checkpoint.save(in("again"));
      });
      expect_equal(saved, everything_in(in("again")), from.describe() + " to " + to.describe());
    }
  }
}

// A forward right after loading computes with what was loaded, also where weights rest whole.
TEST_F(CheckpointTest, TheNextForwardUsesTheLoadedWeights) {
  for (const Layout& layout : layouts()) {
    double saved = 0;
    on(layout, [&](World world) {
      TestRun run(world, layout);
      run.train(0, 3);
      Checkpoint(*run.context).save(in("weights"));
      if (world.rank() == Rank(0))
        saved = toy_loss(run.model, 77).item<double>();
      else
        static_cast<void>(toy_loss(run.model, 77));
    });
    on(layout, [&](World world) {
      TestRun run(world, layout);
      const double before = toy_loss(run.model, 77).item<double>();
      static_cast<void>(Checkpoint(*run.context).load(in("weights")));
      const double after = toy_loss(run.model, 77).item<double>();
      EXPECT_EQ(after, saved) << layout.describe();
      EXPECT_NE(before, saved);
    });
  }
}

TEST_F(CheckpointTest, EveryRankWritesItsShareAndCopiesAreWrittenOnce) {
  const Layout hybrid{2, 2, hsdp("outer", "inner")};
  on(hybrid, [&](World world) {
    TestRun run(world, hybrid);
    Checkpoint(*run.context, run.optimizer.get()).save(in("hybrid"));
  });
  const auto index = TensorIndex::open(in("hybrid"));
  std::int64_t elements = 0;
  std::vector<std::int64_t> written(4);  // [rank]
  for (const auto& [key, tensor] : index.tensors()) {
    elements += tensor.elements();
    for (const auto& piece : tensor.pieces) written[piece.file] += piece.elements.length();
  }
  EXPECT_EQ(written[0] + written[1] + written[2] + written[3], elements);
  for (const auto count : written) EXPECT_LT(count, elements / 2);
  EXPECT_FALSE(fs::exists(in("hybrid.part")));
  EXPECT_FALSE(fs::exists(in("hybrid") / "rank-00000.json"));
}

// Where names cannot be exchanged, a kill between two renames leaves the old one aside.
TEST_F(CheckpointTest, WhatAKillLeftAsideIsFound) {
  const Layout layout{1, 2};
  const auto load = [&] {
    on(layout, [&](World world) {
      TestRun run(world, layout);
      static_cast<void>(Checkpoint(*run.context, run.optimizer.get()).load(in("last")));
      EXPECT_FALSE(at::equal(run.context->full_parameter("exit.weight"), make_toy_model()->exit->weight));
    });
  };
  const auto save = [&] {
    on(layout, [&](World world) {
      TestRun run(world, layout);
      run.train(0, 2);
      Checkpoint(*run.context, run.optimizer.get()).save(in("last"));
    });
  };
  save();
  fs::rename(in("last"), in("last.old"));
  fs::create_directories(in("last.part"));
  load();
  fs::rename(in("last"), in("last.old"));
  save();  // finds it, and replaces it
  EXPECT_FALSE(fs::exists(in("last.old")) || fs::exists(in("last.part")));
  load();
}

TEST_F(CheckpointTest, ASaveInTheBackgroundHoldsTheStateOfItsBegin) {
  const Layout layout{1, 2};
  on(layout, [&](World world) {
    TestRun run(world, layout);
    Checkpoint checkpoint(*run.context, run.optimizer.get());
    run.train(0, 2);
    checkpoint.save(in("two"));
    checkpoint.begin_save(in("background"));
    run.train(2, 4);
    EXPECT_TRUE(checkpoint.save_is_under_way());
    checkpoint.finish_save();
    EXPECT_FALSE(checkpoint.save_is_under_way());
    for (int i = 0; i < 5; ++i) checkpoint.begin_save(in("back-to-back-" + std::to_string(i % 2)));
  });  // the last one is not finished
  expect_equal(everything_in(in("two")), everything_in(in("background")), "in the background");
  on({}, [&](World world) {  // what is written last changes while what is large is written before it
    TestRun run(world, {});
    Checkpoint checkpoint(*run.context);
    at::Tensor last = at::zeros({3});
    checkpoint.add_tensor("large", at::zeros({40'000'000}));
    checkpoint.add_tensor("last", last);
    checkpoint.begin_save(in("large"));
    last.fill_(7);
    checkpoint.finish_save();
  });
  EXPECT_EQ(everything_in(in("large")).at("tensors/last").sum().item<float>(), 0);
  EXPECT_TRUE(TensorIndex::is_checkpoint(in("back-to-back-1")));
  EXPECT_TRUE(TensorIndex::is_checkpoint(in("back-to-back-0"))) << "the one before stays when a save is given up";
  EXPECT_FALSE(fs::exists(in("back-to-back-0.part")));
}

}  // namespace
}  // namespace fsdp::testing
