// What a checkpoint holds beside plain weights: steps, buffers, experts, other orders of elements, files of others.
#include "tests/checkpoint/checkpoint_fixture.h"

namespace fsdp::testing {
namespace {

TEST_F(CheckpointTest, StepsOfParametersThatWereUsedDifferentlyOftenStayApart) {
  struct TwoImpl : torch::nn::Module {
    TwoImpl() {
      a = register_parameter("a", at::full({300}, 1.0));
      b = register_parameter("b", at::full({300}, 1.0));
    }
    at::Tensor forward(at::Tensor x, bool both) { return both ? (x * a * b).sum() : (x * a).sum(); }
    at::Tensor a, b;
  };
  const auto train = [](auto& model, AdamW& optimizer, int first, int end) {
    for (int step = first; step < end; ++step) {
      model->forward(random({300}, static_cast<std::uint64_t>(step)), step % 3 == 0).backward();
      optimizer.step();
      optimizer.zero_grad();
    }
  };
  for (const int ranks : {1, 2, 3}) {
    run_ranks(ranks, [&](World world) {
      const auto make = [&](auto& model) {
        auto context = FsdpContext::create(DeviceMesh(world, {{"dp", world.size()}}));
        context->fully_shard(model, {});
        return context;
      };
      auto model = std::make_shared<Hooked<TwoImpl>>();
      auto context = make(model);
      AdamW optimizer(*context, {.learning_rate = 0.1});
      train(model, optimizer, 0, 4);
      Checkpoint(*context, &optimizer).save(in("four"));
      train(model, optimizer, 4, 8);

      auto other = std::make_shared<Hooked<TwoImpl>>();
      auto other_context = make(other);
      AdamW other_optimizer(*other_context, {.learning_rate = 0.1});
      static_cast<void>(Checkpoint(*other_context, &other_optimizer).load(in("four")));
      train(other, other_optimizer, 4, 8);
      for (const char* name : {"a", "b"})
        EXPECT_TRUE(at::equal(context->full_parameter(name), other_context->full_parameter(name))) << name;
    });
    const auto saved = everything_in(in("four"));
    EXPECT_EQ(saved.at("optimizer/step/a").item<float>(), 4);
    EXPECT_EQ(saved.at("optimizer/step/b").item<float>(), 2);
  }
}

// Elements lie in the order of their strides, and a file says which; plain files are in the order of sizes.
TEST_F(CheckpointTest, TransposedWeightsKeepTheirValues) {
  struct TurnedImpl : torch::nn::Module {
    explicit TurnedImpl(bool turned) {
      const auto values = at::arange(6 * 5, at::kFloat).view({6, 5});
      w = register_parameter("w", turned ? values.t().contiguous().t() : values);
    }
    at::Tensor forward(at::Tensor x) { return x.matmul(w).sum(); }
    at::Tensor w;
  };
  const auto with = [&](bool turned, int ranks, const std::function<void(FsdpContext&)>& body) {
    run_ranks(ranks, [&](World world) {
      auto context = FsdpContext::create(DeviceMesh(world, {{"dp", world.size()}}));
      auto model = std::make_shared<Hooked<TurnedImpl>>(turned);
      context->fully_shard(model, {});
      body(*context);
    });
  };
  for (const bool saved : {true, false}) {
    with(saved, 2, [&](FsdpContext& context) { Checkpoint(context).save(in("turned")); });
    for (const bool loaded : {true, false}) {
      with(loaded, 3, [&](FsdpContext& context) {
        at::NoGradGuard no_grad;
        for (auto& leaf : context.parameters()) leaf.zero_();
        static_cast<void>(Checkpoint(context).load(in("turned")));
        EXPECT_TRUE(at::equal(context.full_parameter("w"), at::arange(30, at::kFloat).view({6, 5}))) << saved << loaded;
      });
    }
  }
}

TEST_F(CheckpointTest, BuffersAddedTensorsFrozenWeightsAndOddSizes) {
  struct OddImpl : torch::nn::Module {
    OddImpl() {
      scalar = register_parameter("scalar", at::full({}, 2.0));
      empty = register_parameter("empty", at::zeros({0, 4}));
      frozen = register_parameter("frozen", at::full({3}, 5.0), /*requires_grad=*/false);
      low = register_parameter("low", at::full({130}, 0.5, at::kBFloat16));
      mean = register_buffer("mean", at::zeros({4}));
      count = register_buffer("count", at::zeros({}, at::kLong));
    }
    at::Tensor forward(at::Tensor x) { return (x * scalar).sum() + frozen.sum() + low.to(at::kFloat).sum(); }
    at::Tensor scalar, empty, frozen, low, mean, count;
  };
  for (const int ranks : {1, 2}) {
    run_ranks(ranks, [&](World world) {
      auto context = FsdpContext::create(DeviceMesh(world, {{"dp", world.size()}}));
      auto model = std::make_shared<Hooked<OddImpl>>();
      context->fully_shard(model, {});
      AdamW optimizer(*context);
      at::Tensor extra = at::full({2, 2}, 7.0);
      Checkpoint checkpoint(*context, &optimizer);
      checkpoint.add_tensor("extra", extra);
      model->forward(at::ones({2})).backward();
      optimizer.step();
      optimizer.zero_grad();
      model->mean.fill_(3);
      model->count.fill_(11);
      const auto scalar = context->full_parameter("scalar"), low = context->full_parameter("low");
      checkpoint.save(in("odd"));
      model->mean.zero_(), model->count.zero_(), extra.zero_();
      {
        at::NoGradGuard no_grad;
        for (auto& leaf : context->parameters()) leaf.zero_();
      }
      // Trained from here on, though it was frozen when the checkpoint was made.
      model->frozen.set_requires_grad(true);
      model->forward(at::ones({2})).backward();
      optimizer.zero_grad();
      const auto loaded = checkpoint.load(in("odd"));
      EXPECT_EQ(loaded.fresh, world.rank() == Rank(0) ? std::vector<std::string>{"frozen"} : loaded.fresh);
      EXPECT_TRUE(at::equal(model->mean, at::full({4}, 3.0)));
      EXPECT_EQ(model->count.item<std::int64_t>(), 11);
      EXPECT_TRUE(at::equal(extra, at::full({2, 2}, 7.0)));
      EXPECT_TRUE(at::equal(context->full_parameter("scalar"), scalar));
      EXPECT_TRUE(at::equal(context->full_parameter("low"), low));
      EXPECT_TRUE(at::equal(context->full_parameter("frozen"), at::full({3}, 5.0)));
    });
  }
}

// Ranks of "ep" hold other experts under one name: together they are the whole, so another number of them can load it.
TEST_F(CheckpointTest, ExpertsAreOneTensorOverTheRanksThatShareThem) {
  struct ExpertsImpl : torch::nn::Module {
    ExpertsImpl(std::int64_t first, std::int64_t count) {
      w = register_parameter("w", at::arange(first * 6, (first + count) * 6, at::kFloat).view({count, 2, 3}));
    }
    at::Tensor forward(at::Tensor x) { return (x * w).sum(); }
    at::Tensor w;
  };
  const auto with = [&](int edp, int ep, const std::function<void(FsdpContext&, AdamW&, ExpertsImpl&)>& body) {
    run_ranks(edp * ep, [&](World world) {
      const DeviceMesh mesh(world, {{"edp", edp}, {"ep", ep}});
      auto context = FsdpContext::create(mesh);
      const std::int64_t own = 4 / ep;
      auto model = std::make_shared<Hooked<ExpertsImpl>>(mesh.coordinate(1) * own, own);
      context->fully_shard(model, {.placements = zero3("edp"), .partitioned_axes = {"ep"}});
      AdamW optimizer(*context);
      body(*context, optimizer, *model);
    });
  };
  with(2, 2, [&](FsdpContext& context, AdamW& optimizer, ExpertsImpl& model) {
    dynamic_cast<Hooked<ExpertsImpl>&>(model).forward(at::ones({1})).backward();
    optimizer.step();
    optimizer.zero_grad();
    Checkpoint(context, &optimizer).save(in("experts"));
  });
  const auto saved = everything_in(in("experts"));
  EXPECT_EQ(saved.at("weights/w").numel(), 24);
  EXPECT_EQ(saved.at("optimizer/step/w").numel(), 2);
  with(1, 2, [&](FsdpContext& context, AdamW& optimizer, ExpertsImpl&) {
    Checkpoint checkpoint(context, &optimizer);
    static_cast<void>(checkpoint.load(in("experts")));
    checkpoint.save(in("again"));
  });
  expect_equal(saved, everything_in(in("again")), "on fewer copies");
  with(1, 4, [&](FsdpContext& context, AdamW& optimizer, ExpertsImpl&) {
    Checkpoint checkpoint(context, &optimizer);
    static_cast<void>(checkpoint.load(in("experts")));
    checkpoint.save(in("more ranks"));
    const auto expected = saved.at("weights/w").view({4, 2, 3});
    const auto rank = context.mesh().coordinate(1);
    EXPECT_TRUE(at::equal(context.full_parameter("w"), expected.narrow(0, rank, 1)));
  });
  const auto more = everything_in(in("more ranks"));
  EXPECT_TRUE(at::equal(more.at("optimizer/step/w"), at::full({4}, 1.0)));
  for (const char* key : {"weights/w", "optimizer/exp_avg/w", "optimizer/exp_avg_sq/w"})
    EXPECT_TRUE(at::equal(more.at(key), saved.at(key))) << key;
}

// Stages of a pipeline hold other weights under other names, and add other tensors.
TEST_F(CheckpointTest, StagesOfAPipelineAreStoredSideBySide) {
  struct StageImpl : torch::nn::Module {
    explicit StageImpl(int stage) {
      w = register_parameter("w" + std::to_string(stage), at::full({3, 50}, stage + 1.0));
    }
    at::Tensor forward(at::Tensor x) { return (x * w).sum(); }
    at::Tensor w;
  };
  const auto with = [&](int pp, const std::function<void(FsdpContext&, AdamW&, Checkpoint&, at::Tensor&, int)>& body) {
    run_ranks(pp * 2, [&](World world) {
      const DeviceMesh mesh(world, {{"pp", pp}, {"dp", 2}});
      const int stage = mesh.coordinate(0);
      auto context = FsdpContext::create(mesh);
      auto model = std::make_shared<Hooked<StageImpl>>(stage);
      context->fully_shard(model, {.placements = zero3("dp"), .partitioned_axes = {"pp"}});
      AdamW optimizer(*context);
      Checkpoint checkpoint(*context, &optimizer);
      at::Tensor extra = at::full({2}, 10.0 + stage);
      checkpoint.add_tensor("of stage " + std::to_string(stage), extra);
      if (stage == 1) checkpoint.add_tensor("of the second alone", at::ones({1}));
      model->forward(at::ones({1})).backward();
      body(*context, optimizer, checkpoint, extra, stage);
    });
  };
  with(3, [&](FsdpContext&, AdamW& optimizer, Checkpoint& checkpoint, at::Tensor&, int) {
    optimizer.step();
    optimizer.zero_grad();
    checkpoint.save(in("stages"));
  });
  const auto saved = everything_in(in("stages"));
  EXPECT_EQ(saved.at("weights/w0").numel(), 150);
  EXPECT_EQ(saved.at("optimizer/step/w2").item<float>(), 1);
  EXPECT_EQ(saved.at("tensors/of stage 2")[0].item<float>(), 12);
  with(3, [&](FsdpContext& context, AdamW& optimizer, Checkpoint& checkpoint, at::Tensor& extra, int stage) {
    optimizer.zero_grad();
    extra.zero_();
    static_cast<void>(checkpoint.load(in("stages")));
    EXPECT_TRUE(at::equal(extra, at::full({2}, 10.0 + stage)));
    const auto name = "w" + std::to_string(stage);
    EXPECT_TRUE(at::equal(context.full_parameter(name).view({-1}), saved.at("weights/" + name)));
    checkpoint.save(in("again"));
  });
  expect_equal(saved, everything_in(in("again")), "stages");

  run_ranks(2, [&](World world) {  // nobody says what the ranks of "tp" hold
    auto context = FsdpContext::create(DeviceMesh(world, {{"tp", 2}, {"dp", 1}}));
    auto model = std::make_shared<Hooked<StageImpl>>(0);
    context->fully_shard(model, {.placements = zero3("dp")});
    EXPECT_THAT(message_of([&] { Checkpoint(*context).save(in("tp")); }), HasSubstr("mesh axis \"tp\""));
  });
}

// Weights as others write them: one file, other names, another dtype.
TEST_F(CheckpointTest, PlainFilesGiveWeightsUnderTheirOwnNames) {
  on({1, 2}, [&](World world) {
    TestRun run(world, {1, 2});
    run.train(0, 2);
    Checkpoint(*run.context).save(in("own"));
  });
  const auto own = everything_in(in("own"));
  checkpoint::SafetensorsHeader header;
  std::string data;
  const auto index = TensorIndex::open(in("own"));
  for (const auto& [key, value] : own) {
    const auto half = value.to(at::kBFloat16);
    header.entries.push_back({.name = "net." + key.substr(8),
                              .dtype = "BF16",
                              .sizes = index.find(key)->sizes,
                              .bytes = static_cast<std::int64_t>(half.nbytes())});
    data.append(static_cast<const char*>(half.const_data_ptr()), half.nbytes());
  }
  const auto start = checkpoint::make_safetensors_header(header);
  std::ofstream(in("plain.safetensors"), std::ios::binary) << start << data;
  on({1, 3}, [&](World world) {
    TestRun run(world, {1, 3});
    const LoadOptions options{.optimizer = false, .stored_name = [](const std::string& name) { return "net." + name; }};
    const auto result = Checkpoint(*run.context, run.optimizer.get()).load(in("plain.safetensors"), options);
    EXPECT_EQ(result.ranks, 0);
    EXPECT_TRUE(at::equal(run.context->full_parameter("exit.weight").view({-1}),
                          own.at("weights/exit.weight").to(at::kBFloat16).to(at::kFloat)));
    EXPECT_THAT(message_of([&] {
                  static_cast<void>(Checkpoint(*run.context).load(in("plain.safetensors"), {.optimizer = false}));
                }),
                HasSubstr("lacks"));
    EXPECT_THAT(message_of([&] {
                  static_cast<void>(Checkpoint(*run.context, run.optimizer.get()).load(in("plain.safetensors")));
                }),
                HasSubstr("weights only"));
  });
}

}  // namespace
}  // namespace fsdp::testing
