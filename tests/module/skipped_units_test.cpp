// Ranks that run different units: an error with both names, or participation with zeros.
#include <ATen/TensorOperators.h>
#include <ATen/ops/linear.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/optim/adamw.h>

#include <mutex>

#include "tests/support/equals_unsharded.h"

namespace fsdp::testing {
namespace {

struct ExpertImpl : torch::nn::Module {
  ExpertImpl() { weight = register_parameter("weight", at::ones({4, 4})); }
  at::Tensor forward(at::Tensor x) { return at::linear(x, weight).tanh(); }
  at::Tensor weight;
};
FSDP_MODULE(Expert);

struct ExpertsImpl : torch::nn::Module {
  explicit ExpertsImpl(int count) {
    for (int i = 0; i < count; ++i) experts->push_back(Expert());
    register_module("experts", experts);
    out = register_parameter("out", at::ones({4}));
  }
  at::Tensor forward(at::Tensor x, const std::vector<int>& chosen) {
    for (int i : chosen) x = x + experts[i]->as<Hooked<ExpertImpl>>()->forward(x);
    return x * out;
  }
  torch::nn::ModuleList experts;
  at::Tensor out;
};
FSDP_MODULE(Experts);

// What each rank runs, in one step.
using Choice = std::function<std::vector<int>(int rank, int step)>;

void train_and_compare(int ranks, const Choice& choose, const ContextOptions& options, const UnitOptions& unit,
                       bool evaluate = false, bool frozen = false) {
  constexpr int kSteps = 4;
  const auto make = [&] {
    auto model = filled(Experts(4));
    if (frozen) model->experts[2]->as<ExpertImpl>()->weight.set_requires_grad(false);
    return model;
  };
  auto reference = make();
  torch::optim::AdamW reference_optimizer(reference->parameters());
  for (int step = 0; step < kSteps; ++step) {
    reference_optimizer.zero_grad();
    for (int rank = 0; rank < ranks; ++rank)
      (reference->forward(random({3, 4}, 10 * step + rank), choose(rank, step)) / ranks).sum().backward();
    reference_optimizer.step();
  }
  run_ranks(ranks,
            [&](World world) {
              const int rank = static_cast<int>(world.rank().value());
              auto context = FsdpContext::create(DeviceMesh(world, {{"dp", ranks}}), options);
              auto model = make();
              for (auto& expert : *model->experts) context->fully_shard(expert, unit);
              context->fully_shard(model, unit);
              torch::optim::AdamW optimizer(context->parameters());
              for (int step = 0; step < kSteps; ++step) {
                optimizer.zero_grad();
                model->forward(random({3, 4}, 10 * step + rank), choose(rank, step)).sum().backward();
                EXPECT_EQ(context->memory_report().gathered, Bytes(0));
                optimizer.step();
                if (!evaluate) continue;
                at::NoGradGuard no_grad;
                (void)model->forward(random({3, 4}, 1), choose(rank, step + 1));
                EXPECT_EQ(context->memory_report().gathered, Bytes(0));
              }
              for (auto& item : reference->named_parameters()) {
                EXPECT_TRUE(at::allclose(context->full_parameter(item.key()), item.value(), 1e-5, 1e-6)) << item.key();
              }
            },
            {.deadline = std::chrono::seconds(30)});
}

Choice by_rank() {
  return [](int rank, int step) { return std::vector<int>{(rank + step) % 4}; };
}

TEST(SkippedUnits, AreNamedWhereTheyDiffer) {
  std::string message;
  try {
    train_and_compare(2, by_rank(), {.prefetch = Prefetch::none()}, {});
    ADD_FAILURE() << "no error";
  } catch (const CommunicationError& error) {
    message = error.what();
  }
  EXPECT_NE(message.find("\"FSDP:experts.0:unshard\""), std::string::npos) << message;
  EXPECT_NE(message.find("\"FSDP:experts.1:unshard\""), std::string::npos) << message;
}

TEST(SkippedUnits, ParticipateWithZerosAndTheRunEqualsTheUnshardedOne) {
  for (const auto& prefetch : {Prefetch::none(), Prefetch::depth(1), Prefetch::depth(2)}) {
    for (bool keep_last : {false, true}) {
      for (auto reshard : {Reshard::automatic, Reshard::after_forward, Reshard::never}) {
        for (const auto& strategy : {zero3("dp"), zero1("dp")}) {
          const ContextOptions options{
              .prefetch = prefetch, .keep_last = keep_last, .skipped_units = SkippedUnits::participate};
          SCOPED_TRACE(fmt::format("prefetch {} keep_last {} reshard {} {}", prefetch.amount, keep_last,
                                   static_cast<int>(reshard), strategy.name));
          train_and_compare(2, by_rank(), options, {.placements = strategy, .reshard = reshard}, true);
        }
      }
    }
  }
  const ContextOptions options{.skipped_units = SkippedUnits::participate};
  // None, all, several; nobody uses some; frozen ones among them.
  const std::vector<Choice> choices{[](int rank, int) {
                                      return rank == 0 ? std::vector<int>{} : std::vector<int>{0, 1, 2, 3};
                                    },
                                    [](int rank, int step) {
                                      return rank == 1 ? std::vector<int>{1, 3} : std::vector<int>{step % 2 * 2};
                                    },
                                    [](int, int) { return std::vector<int>{2}; },
                                    [](int rank, int) { return std::vector<int>{3 - rank % 4}; }};
  for (const auto& choose : choices) {
    for (int ranks : {1, 2, 3}) {
      for (bool frozen : {false, true}) train_and_compare(ranks, choose, options, {}, true, frozen);
    }
  }
  ContextOptions delayed = options;
  delayed.reduction = Reduction::delayed(1);
  delayed.inline_limit = Bytes(0);
  train_and_compare(3, choices[1], delayed, {});
}

TEST(SkippedUnits, ParticipationNeedsStaticOrdersAndOneRoot) {
  const auto refused = [](const ContextOptions& options, bool root, const std::string& part) {
    auto context = FsdpContext::create(DeviceMesh(World::single(), {{"dp", 1}}), options);
    Experts model(2);
    for (auto& expert : *model->experts) context->fully_shard(expert, {});
    if (root) context->fully_shard(model, {});
    try {
      context->finalize();
      ADD_FAILURE() << "not refused";
    } catch (const UsageError& error) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
  };
  refused({.prefetch = Prefetch::recorded(), .skipped_units = SkippedUnits::participate}, true, "Prefetch::none()");
  refused({.skipped_units = SkippedUnits::participate}, false, "there are 2");
}

TEST(SkippedUnits, RecomputedFunctionsOfSeveralUnitsCannotParticipate) {
  run_ranks(1, [](World world) {
    auto context = FsdpContext::create(DeviceMesh(world, {{"dp", 1}}), {.skipped_units = SkippedUnits::participate});
    auto model = filled(Experts(4));
    for (auto& expert : *model->experts) context->fully_shard(expert, {});
    context->fully_shard(model, {});
    const auto expert = [&](int i) { return model->experts[i]->as<Hooked<ExpertImpl>>(); };
    const auto x = random({3, 4}, 1);
    (void)fsdp::recompute([&](at::Tensor y) { return expert(1)->forward(y); }, x);
    try {
      (void)fsdp::recompute([&](at::Tensor y) { return expert(2)->forward(expert(1)->forward(y)); }, x);
      ADD_FAILURE() << "not refused";
    } catch (const UsageError& error) {
      EXPECT_NE(
          std::string(error.what()).find("units \"experts.1\" and \"experts.2\" run inside one recomputed function"),
          std::string::npos)
          << error.what();
    }
  });
}

// --- Ranks that are in different parts of the run ---

std::string failure_of(const std::function<void(World)>& rank_main, int ranks = 2) {
  try {
    run_ranks(ranks, rank_main, {.deadline = std::chrono::seconds(30)});
  } catch (const CommunicationError& error) {
    return error.what();
  }
  return "no error";
}

TEST(DifferentMicrobatches, AreFoundBeforeDataIsMixed) {
  for (const auto& strategy : {zero3("dp"), zero1("dp")}) {
    // Two microbatches here, three there.
    const auto message = failure_of([&](World world) {
      ToyRank r(world, {}, {.placements = strategy});
      const int count = r.rank == 0 ? 2 : 3;
      for (int step = 0; step < 2; ++step) {
        for (int m = 0; m < count; ++m) {
          auto scope = r.context->microbatch({.is_last = m + 1 == count});
          toy_loss(r.model, m).backward();
        }
      }
    });
    // Where weights rest whole, the first collective of a microbatch is its reduction.
    const bool rests = strategy.name == "zero1";
    EXPECT_NE(message.find("in microbatch 1 (the last) of step 0"), std::string::npos) << message;
    EXPECT_NE(message.find(rests ? "in microbatch 2 (the last) of step 0" : "in microbatch 1 of step 0"),
              std::string::npos)
        << message;
    EXPECT_NE(message.find("as many microbatches in each step"), std::string::npos) << message;
  }
  // Without scopes: one more backward before the optimizer's step.
  const auto message = failure_of([](World world) {
    ToyRank r(world);
    Sgd optimizer(*r.context, {});
    for (int step = 0; step < 2; ++step) {
      for (int m = 0; m < 1 + r.rank; ++m) toy_loss(r.model, m).backward();
      optimizer.step();
    }
  });
  EXPECT_NE(message.find("after 1 optimizer steps"), std::string::npos) << message;
  EXPECT_NE(message.find("after 0 optimizer steps"), std::string::npos) << message;
}

TEST(DifferentMicrobatches, EvaluationsOnOneRankOnlyAreNamed) {
  const auto message = failure_of([](World world) {
    ToyRank r(world);
    toy_loss(r.model, 1).backward();
    if (r.rank == 0) {
      at::NoGradGuard no_grad;
      (void)toy_loss(r.model, 2);
    }
  });
  EXPECT_NE(message.find("a rank has ended; missing ranks: 1"), std::string::npos) << message;
}

}  // namespace
}  // namespace fsdp::testing
