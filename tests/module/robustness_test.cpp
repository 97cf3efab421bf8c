// Exceptions anywhere, on all ranks or on one; what is left behind; what the user is told.
#include <ATen/TensorOperators.h>
#include <ATen/ops/linear.h>
#include <malloc.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <filesystem>
#include <mutex>

#include "tests/support/equals_unsharded.h"

namespace fsdp::testing {
namespace {

enum class Bomb { none, forward, after_forward, backward, second_backward_hook };

struct FuseImpl : torch::nn::Module {
  FuseImpl() { weight = register_parameter("weight", at::ones({4, 4})); }
  at::Tensor forward(at::Tensor x) {
    if (bomb == Bomb::forward) throw std::runtime_error("bomb in forward");
    auto y = fsdp::linear(x, weight);
    if (bomb == Bomb::after_forward) throw std::runtime_error("bomb after forward");
    if (bomb == Bomb::backward)
      y.register_hook([](at::Tensor) -> at::Tensor { throw std::runtime_error("bomb in backward"); });
    return y.tanh();
  }
  at::Tensor weight;
  Bomb bomb = Bomb::none;
};
FSDP_MODULE(Fuse);

struct FusesImpl : torch::nn::Module {
  FusesImpl() {
    for (int i = 0; i < 5; ++i) layers->push_back(Fuse());
    register_module("layers", layers);
    out = register_parameter("out", at::ones({4}));
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& layer : *layers) x = layer->as<Hooked<FuseImpl>>()->forward(x);
    return x * out;
  }
  torch::nn::ModuleList layers;
  at::Tensor out;
};
FSDP_MODULE(Fuses);

at::Tensor fuse_loss(Fuses& model, int seed) { return model->forward(random({3, 4}, seed)).sum(); }

TEST(Recovery, ResetAfterAnExceptionAnywhereEqualsAFreshRun) {
  std::vector<ContextOptions> policies(4);
  policies[1].prefetch = Prefetch::recorded(2);
  policies[1].inline_limit = Bytes(0);
  policies[2].reduction = Reduction::delayed(2);
  policies[2].inline_limit = Bytes(0);
  policies[3].prefetch = Prefetch::delayed_release(2);
  for (const auto& strategy : {zero3("dp"), zero1("dp")}) {
    std::map<std::string, at::Tensor> fresh;
    for (Bomb bomb : {Bomb::none, Bomb::forward, Bomb::after_forward, Bomb::backward}) {
      for (int failing : {-1, 0, 1}) {  // all ranks, or one
        for (int unit : {0, 3, 4}) {
          for (std::size_t p = 0; p < policies.size(); ++p) {
            for (bool accumulating : {false, true}) {
              if (bomb == Bomb::none && (failing >= 0 || unit > 0 || p > 0 || accumulating)) continue;
              run_ranks(2,
                        [&](World world) {
                          SCOPED_TRACE(fmt::format("{} bomb {} on {} unit {} policy {} accumulating {}", strategy.name,
                                                   static_cast<int>(bomb), failing, unit, p, accumulating));
                          const int rank = static_cast<int>(world.rank().value());
                          auto context = FsdpContext::create(DeviceMesh(world, {{"dp", 2}}), policies[p]);
                          auto model = filled(Fuses());
                          for (auto& layer : *model->layers) context->fully_shard(layer, {.placements = strategy});
                          context->fully_shard(model, {.placements = strategy});
                          torch::optim::SGD optimizer(context->parameters(), 0.1);
                          const auto step = [&](int seed) {
                            optimizer.zero_grad();
                            fuse_loss(model, seed + rank).backward();
                            optimizer.step();
                          };
                          step(1);
                          if (bomb != Bomb::none) {
                            auto* fuse = model->layers[unit]->as<FuseImpl>();
                            if (failing < 0 || failing == rank) fuse->bomb = bomb;
                            bool threw = false;
                            try {
                              if (accumulating) {
                                fuse->bomb = Bomb::none;
                                auto scope = context->no_sync();
                                fuse_loss(model, 50 + rank).backward();
                                if (failing < 0 || failing == rank) fuse->bomb = bomb;
                              }
                              fuse_loss(model, 60 + rank).backward();
                            } catch (const std::exception&) {
                              threw = true;
                            }
                            EXPECT_TRUE(threw);
                            fuse->bomb = Bomb::none;
                            context->reset();
                            EXPECT_EQ(context->memory_report().gathered, Bytes(0));
                            EXPECT_EQ(context->memory_report().main_gradients, Bytes(0));
                            EXPECT_EQ(context->memory_report().accumulated, Bytes(0));
                          }
                          step(3);
                          step(5);
                          for (auto& [name, leaf] : context->named_parameters()) {
                            const auto value = context->full_parameter(name);
                            if (rank != 0) continue;
                            if (bomb == Bomb::none) fresh[name] = value;
                            EXPECT_TRUE(at::equal(value, fresh.at(name))) << name;
                          }
                        },
                        {.deadline = std::chrono::seconds(30)});
            }
          }
        }
      }
    }
  }
}

TEST(Recovery, OneRanksFailureIsAnErrorOnAllOfThemWithItsReason) {
  std::vector<std::string> messages(3);
  EXPECT_THROW(run_ranks(3,
                         [&](World world) {
                           const int rank = static_cast<int>(world.rank().value());
                           auto context = FsdpContext::create(DeviceMesh(world, {{"dp", 3}}));
                           auto model = filled(Fuses());
                           for (auto& layer : *model->layers) context->fully_shard(layer, {});
                           context->fully_shard(model, {});
                           if (rank == 1) model->layers[2]->as<FuseImpl>()->bomb = Bomb::forward;
                           try {
                             fuse_loss(model, rank).backward();
                           } catch (const std::exception& error) {
                             messages[rank] = error.what();
                             throw;
                           }
                         },
                         {.deadline = std::chrono::minutes(10)}),
               std::exception);
  EXPECT_EQ(messages[1], "bomb in forward");
  for (int rank : {0, 2}) EXPECT_NE(messages[rank].find("bomb in forward"), std::string::npos) << messages[rank];
}

// A backward that enters where no hook is carries its errors out too.
TEST(Recovery, ErrorsOfABackwardThatEntersAtAStashedValueNameTheirCause) {
  std::string message;
  EXPECT_THROW(run_ranks(2,
                         [&](World world) {
                           auto context = FsdpContext::create(DeviceMesh(world, {{"dp", 2}}), {.keep_last = false});
                           struct StashImpl : torch::nn::Module {
                             StashImpl() { weight = register_parameter("weight", at::ones({4, 4})); }
                             at::Tensor forward(at::Tensor x) {
                               middle = at::linear(x, weight);
                               return middle * 2;
                             }
                             at::Tensor weight, middle;
                           };
                           auto model = std::make_shared<Hooked<StashImpl>>();
                           context->fully_shard(model, {.reshard = Reshard::after_forward});
                           (void)model->forward(random({2, 4}, 1).set_requires_grad(true));
                           if (world.rank().value() == 1) return;  // leaves before the backward
                           try {
                             model->middle.square().sum().backward();
                           } catch (const std::exception& error) {
                             message = error.what();
                             throw;
                           }
                         },
                         {.deadline = std::chrono::minutes(10)}),
               std::exception);
  EXPECT_NE(message.find("missing ranks: 1"), std::string::npos) << message;
}

TEST(Teardown, WithAPeerGoneEndsAtOnce) {
  for (bool in_flight : {false, true}) {
    const auto start = std::chrono::steady_clock::now();
    try {
      run_ranks(2,
                [&](World world) {
                  ContextOptions options;
                  options.inline_limit = Bytes(0);
                  auto context = FsdpContext::create(DeviceMesh(world, {{"dp", 2}}), options);
                  auto model = filled(Fuses());
                  for (auto& layer : *model->layers) context->fully_shard(layer, {});
                  context->fully_shard(model, {});
                  fuse_loss(model, 1).backward();
                  if (world.rank().value() == 1) return;
                  if (in_flight) context->unit("layers.2").unshard();  // waits for a rank that is gone
                },
                {.deadline = std::chrono::minutes(10)});
    } catch (const CommunicationError&) {
    }
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::minutes(5));  // not the deadline
  }
}

int entries_of(const char* folder) {
  int count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder)) ++count;
  return count;
}

TEST(Teardown, FiftyContextsLeaveNoThreadFileDescriptorOrByte) {
  run_ranks(2, [](World world) {
    int threads = 0, files = 0;
    std::size_t heap = 0;
    for (int i = 0; i < 50; ++i) {
      {
        auto context = FsdpContext::create(DeviceMesh(world, {{"outer", 1}, {"dp", 2}}));
        auto model = filled(Fuses());
        for (auto& layer : *model->layers) context->fully_shard(layer, {.placements = hsdp("outer", "dp")});
        context->fully_shard(model, {.placements = hsdp("outer", "dp")});
        fuse_loss(model, 1).backward();
        EXPECT_EQ(context->counters().reductions, 6);
      }
      // Both ranks are here, with nothing alive, when one of them counts.
      DeviceMesh meeting(world, {{"dp", 2}});
      const Stream stream = world.runtime()->compute_stream();
      meeting.communicator(0, Use::gather).barrier(stream, "counting");
      if (world.rank().value() == 0 && i == 9) {
        threads = entries_of("/proc/self/task");
        files = entries_of("/proc/self/fd");
        heap = mallinfo2().uordblks;
      }
      if (world.rank().value() == 0 && i == 49) {
        EXPECT_EQ(entries_of("/proc/self/task"), threads);
        EXPECT_EQ(entries_of("/proc/self/fd"), files);
        EXPECT_LT(mallinfo2().uordblks, heap + 40 * 1024);  // forty contexts: less than a kilobyte each
      }
      meeting.communicator(0, Use::gather).barrier(stream, "counted");
    }
  });
}

// --- What the user is told ---

struct Logged {
  std::vector<std::pair<log::Level, std::string>> lines;
  std::mutex mutex;
  Logged() {
    log::set_sink([this](log::Level level, std::string_view text) {
      std::lock_guard lock(mutex);
      lines.emplace_back(level, text);
    });
  }
  ~Logged() { log::set_sink({}); }
  [[nodiscard]] int count(log::Level level, const std::string& part) {
    std::lock_guard lock(mutex);
    return static_cast<int>(std::count_if(lines.begin(), lines.end(), [&](const auto& line) {
      return line.first == level && line.second.find(part) != std::string::npos;
    }));
  }
};

TEST(Messages, OneSummaryLineSaysWhatWasBuilt) {
  Logged logged;
  run_ranks(4, [](World world) {
    auto context = FsdpContext::create(DeviceMesh(world, {{"outer", 2}, {"inner", 2}}));
    auto model = make_toy_model();
    model->register_buffer("table", at::ones({256}));
    model->exit->weight.set_requires_grad(false);
    shard_toy_model(*context, model, {.placements = hsdp("outer", "inner")});
    context->finalize();
  });
  ASSERT_EQ(logged.lines.size(), 1u);
  for (const char* part :
       {"4 units", "22 parameters of", "(21 frozen)", "1 buffers of 1.0 KiB", "outer=2 x inner=2", "4 ranks by threads",
        "hsdp: gather all_gather over inner, reduce reduce_scatter over inner, then all_reduce over outer on the last "
        "microbatch",
        "a unit takes", "prefetch depth 1", "reductions immediate"})
    EXPECT_EQ(logged.count(log::Level::info, part), 1) << part << "\n" << logged.lines[0].second;
}

TEST(Messages, ARootThatIsTheOnlyUnitAndAHugeUnitAreWarnedOfWithTheirShare) {
  struct WideImpl : torch::nn::Module {
    WideImpl() {
      big = register_parameter("big", at::empty({1200, 1000}));
      inner = register_module("inner", Fuse());
    }
    at::Tensor forward(at::Tensor x) { return inner->forward(x); }
    at::Tensor big;
    Fuse inner{nullptr};
  };
  for (bool split : {false, true}) {
    Logged logged;
    auto context = FsdpContext::create(DeviceMesh(World::single(), {{"dp", 1}}));
    auto model = std::make_shared<Hooked<WideImpl>>();
    if (split) context->fully_shard(model->inner, {});
    context->fully_shard(model, {});
    context->finalize();
    EXPECT_EQ(logged.count(log::Level::warning, "unit \"<root>\" holds 100 % of all sharded weights"), 1) << split;
  }
  Logged logged;
  auto context = FsdpContext::create(DeviceMesh(World::single(), {{"dp", 1}}));
  auto small = make_toy_model();
  shard_toy_model(*context, small, {});
  context->finalize();
  EXPECT_EQ(logged.count(log::Level::warning, ""), 0);
}

TEST(Messages, AnOptimizerOverTheWrongTensorsIsFoundOutOnce) {
  for (bool wrong : {true, false}) {
    Logged logged;
    run_toy(2, [&](ToyRank& r) {
      torch::optim::SGD optimizer(wrong ? r.model->parameters() : r.context->parameters(), 0.1);
      for (int step = 0; step < 8; ++step) {
        optimizer.zero_grad();
        toy_loss(r.model, step).backward();
        optimizer.step();
      }
    });
    EXPECT_EQ(logged.count(log::Level::warning, "context->parameters(), not over model->parameters()"), wrong ? 2 : 0);
  }
  // Gradients that add up on purpose, with weights that move: nothing to say.
  Logged logged;
  run_toy(1, [&](ToyRank& r) {
    torch::optim::SGD optimizer(r.context->parameters(), 0.1);
    for (int step = 0; step < 8; ++step) {
      toy_loss(r.model, step).backward();
      optimizer.step();
    }
  });
  EXPECT_EQ(logged.count(log::Level::warning, ""), 0);
}

TEST(Messages, RefusalsComeBeforeAnythingIsChanged) {
  auto context = FsdpContext::create(DeviceMesh(World::single(), {{"dp", 1}}));
  auto model = make_toy_model();
  const auto before = model->blocks[0]->as<ToyBlockImpl>()->gain.clone();
  const auto refused = [&](const UnitOptions& options, const std::string& part) {
    try {
      context->fully_shard(model->blocks[0], options);
      ADD_FAILURE() << "not refused: " << part;
    } catch (const UsageError& error) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
  };
  refused({.mixed_precision = {.param_dtype = at::kInt}}, "asks for Int; expected Float, Double, BFloat16 or Half");
  refused({.mixed_precision = {.main_grad_dtype = at::kFloat8_e4m3fn}}, "asks for Float8_e4m3fn");
  refused({.replicate_up_to = -1}, "replicate_up_to is -1");
  model->blocks[0]->register_parameter("steps", at::ones({3}, at::kLong), false);
  refused({}, "parameter \"steps\" is Long; only floating-point parameters can be sharded");
  EXPECT_TRUE(at::equal(model->blocks[0]->as<ToyBlockImpl>()->gain, before));
  EXPECT_EQ(context->units().size(), 0u);
  context->fully_shard(model->blocks[1], {});  // and the context is still good
}

}  // namespace
}  // namespace fsdp::testing
