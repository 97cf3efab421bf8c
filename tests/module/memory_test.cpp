// Where memory goes: the formula, flat in depth and in time, and equal to what the allocator counts.
#include <ATen/TensorOperators.h>
#include <ATen/ops/linear.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <malloc.h>
#include <torch/nn/modules/container/modulelist.h>

#include <atomic>

#include "tests/support/equals_unsharded.h"

namespace fsdp::testing {
namespace {

struct LayerImpl : torch::nn::Module {
  LayerImpl(std::int64_t width, bool frozen) {
    weight = register_parameter("weight", at::ones({width, width}), !frozen);
    bias = register_parameter("bias", at::ones({width}));
  }
  at::Tensor forward(at::Tensor x) { return fsdp::linear(x, weight, bias).tanh(); }
  at::Tensor weight, bias;
};
FSDP_MODULE(Layer);

struct LayersImpl : torch::nn::Module {
  LayersImpl(int depth, std::int64_t width, bool frozen) {
    for (int i = 0; i < depth; ++i) layers->push_back(Layer(width, frozen));
    register_module("layers", layers);
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& layer : *layers) x = layer->as<Hooked<LayerImpl>>()->forward(x);
    return x.sum();
  }
  torch::nn::ModuleList layers;
};
FSDP_MODULE(Layers);

constexpr std::int64_t kWidth = 128;

// Elements of one unit, packed and padded to equal aligned shards.
std::int64_t unit_elements(int shards, bool weight = true, bool bias = true) {
  const std::int64_t elements = (weight ? kWidth * kWidth : 0) + (bias ? kWidth : 0);
  const std::int64_t multiple = GlobalLayout::kAlignment * shards;
  return (elements + multiple - 1) / multiple * multiple;
}

struct MemoryRank {
  MemoryRank(World world, int depth, const ContextOptions& options, const UnitOptions& unit, bool frozen = false,
             int outer = 1)
      : context(FsdpContext::create(
            DeviceMesh(world, {{"outer", outer}, {"dp", static_cast<int>(world.size()) / outer}}), options)),
        model(depth, kWidth, frozen) {
    for (auto& layer : *model->layers) context->fully_shard(layer, unit);
    context->fully_shard(model, unit);
  }
  void step(int microbatches = 1) {
    for (int m = 0; m < microbatches; ++m) {
      auto scope = context->microbatch({.is_last = m + 1 == microbatches});
      model->forward(at::ones({2, kWidth})).backward();
    }
  }
  std::shared_ptr<FsdpContext> context;
  Layers model;
};

TEST(Memory, RestsAndPeaksByTheFormulaAtAnyDepth) {
  for (int depth : {4, 8, 16}) {
    for (const auto& prefetch : {Prefetch::none(), Prefetch::depth(1), Prefetch::depth(2)}) {
      for (int ranks : {1, 2, 4}) {
        run_ranks(ranks, [&](World world) {
          MemoryRank r(world, depth, {.prefetch = prefetch}, {.placements = zero3("dp")});
          r.step();
          const auto report = r.context->memory_report();
          const std::int64_t unit = unit_elements(ranks);
          EXPECT_EQ(report.main_weights, Bytes(depth * unit * 4 / ranks));
          EXPECT_EQ(report.model_weights, Bytes(0));
          EXPECT_EQ(report.main_gradients, report.main_weights);
          EXPECT_EQ(report.gathered_peak, Bytes((prefetch.amount + 1) * unit * 4));
          EXPECT_EQ(report.reduce_slots_peak, Bytes(2 * unit * 4));
          EXPECT_EQ(report.gathered, Bytes(0));
          EXPECT_EQ(report.reduce_slots, Bytes(0));
          AdamW optimizer(*r.context, {});
          Bytes owned;  // state is for elements that exist: padding has none
          for (auto& leaf : r.context->parameters()) owned += Bytes(leaf.numel() * 4);
          EXPECT_GE(optimizer.state_bytes(), owned * 2);
          EXPECT_LE(optimizer.state_bytes(), report.main_weights * 2);
          EXPECT_EQ(r.context->counters().peak_reduce_slots, 2);
        });
      }
    }
  }
}

TEST(Memory, HybridsKeepNoReductionBuffersPerLayer) {
  for (const auto& strategy : {hsdp("outer", "dp"), hfsdp("outer", "dp")}) {
    for (int depth : {4, 8, 16}) {
      for (auto [outer, inner] : std::vector<std::pair<int, int>>{{2, 1}, {2, 2}}) {
        run_ranks(outer * inner, [&](World world) {
          MemoryRank r(
              world, depth, {},
              {.placements = strategy, .mixed_precision = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}},
              false, outer);
          r.step(2);
          const auto report = r.context->memory_report();
          const int shards = inner * (strategy.name == "hfsdp" ? outer : 1);
          const std::int64_t unit = unit_elements(shards), main = depth * unit * 4 / shards;
          EXPECT_EQ(report.main_weights, Bytes(main)) << strategy.name;
          EXPECT_EQ(report.main_gradients, Bytes(main));
          EXPECT_EQ(report.model_weights, Bytes(depth * unit * 2 / inner));
          EXPECT_EQ(report.reduce_slots_peak, Bytes(2 * unit * 4));
          EXPECT_EQ(report.gathered_peak, Bytes(2 * unit * 2));
          EXPECT_EQ(report.accumulated, Bytes(0));  // gone with the last microbatch
        });
      }
    }
  }
}

TEST(Memory, FrozenWeightsCostNothingButThemselves) {
  for (int depth : {4, 8, 16}) {
    run_ranks(2, [&](World world) {
      MemoryRank r(world, depth, {}, {.placements = zero3("dp")}, /*frozen=*/true);
      r.step();
      const auto report = r.context->memory_report();
      const std::int64_t trainable = unit_elements(2, false, true), base = unit_elements(2, true, false);
      EXPECT_EQ(report.main_weights, Bytes(depth * (base + trainable) * 4 / 2));
      EXPECT_EQ(report.main_gradients, Bytes(depth * trainable * 4 / 2));
      EXPECT_EQ(report.reduce_slots_peak, Bytes(2 * trainable * 4));
      EXPECT_EQ(report.gathered_peak, Bytes(2 * (base + trainable) * 4));
    });
  }
}

TEST(Memory, ShardingSavesAlmostHalfOnTwoRanks) {
  Bytes replicated, sharded, bound;
  for (bool shard : {false, true}) {
    run_ranks(2, [&](World world) {
      MemoryRank r(world, 16, {}, {.placements = shard ? zero3("dp") : ddp("dp")});
      r.step();
      AdamW optimizer(*r.context, {});
      const auto report = r.context->memory_report();
      if (world.rank().value() != 0) return;
      (shard ? sharded : replicated) = report.total() + optimizer.state_bytes();
      bound = report.gathered_reserved + report.reduce_slots_reserved;
    });
  }
  EXPECT_LE(sharded, Bytes(replicated.value() / 2) + bound);
}

// Counts what ATen's CPU allocator hands out on the installing thread.
class CountingReporter final : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(void*, std::int64_t size, std::size_t, std::size_t, c10::Device) override { live += size; }
  [[nodiscard]] bool memoryProfilingEnabled() const override { return true; }
  std::atomic<std::int64_t> live{0};
};

TEST(Memory, TheReportEqualsWhatTheAllocatorCounts) {
  for (const auto& strategy : {ddp("dp"), zero1("dp"), zero2("dp"), zero3("dp")}) {
    for (bool bf16 : {false, true}) {
      run_ranks(2, [&](World world) {
        auto counter = std::make_shared<CountingReporter>();
        c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, counter);
        const std::int64_t before = counter->live;
        MemoryRank r(
            world, 4, {},
            {.placements = strategy,
             .mixed_precision = bf16 ? MixedPrecisionPolicy{.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}
                                     : MixedPrecisionPolicy{}});
        EXPECT_EQ(counter->live - before, r.context->memory_report().total().value()) << strategy.name << " built";
        for (int step = 0; step < 3; ++step) {
          r.step(2);
          EXPECT_EQ(counter->live - before, r.context->memory_report().total().value())
              << strategy.name << " step " << step;
          if (step < 2) {
            for (auto& leaf : r.context->parameters()) leaf.mutable_grad().reset();
          }
        }
        {
          auto scope = r.context->no_sync();
          r.model->forward(at::ones({2, kWidth})).backward();
          EXPECT_EQ(counter->live - before, r.context->memory_report().total().value())
              << strategy.name << " accumulating";
        }
      });
    }
  }
}

TEST(Memory, NothingGrowsOverSteps) {
  run_ranks(2, [](World world) {
    auto context = FsdpContext::create(DeviceMesh(world, {{"dp", 2}}), {.prefetch = Prefetch::recorded(1)});
    Layers model(40, 8, false);
    for (auto& layer : *model->layers) context->fully_shard(layer, {});
    context->fully_shard(model, {});
    Sgd optimizer(*context, {.learning_rate = 1e-3});
    auto counter = std::make_shared<CountingReporter>();
    c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, counter);
    std::int64_t tensors = 0;
    std::size_t heap = 0;
    for (int step = 0; step < 100; ++step) {
      model->forward(at::ones({1, 8})).backward();
      optimizer.step(clip_grad_norm_(*context, 1.0));
      optimizer.zero_grad();
      if (step == 20) {
        tensors = counter->live;
        heap = mallinfo2().uordblks;
      }
    }
    EXPECT_EQ(counter->live, tensors);
    EXPECT_LT(mallinfo2().uordblks, heap + 64 * 1024);  // both ranks' heap; a leak of one object a unit would be more
  });
}

TEST(Memory, ExportingWholeWeightsKeepsNothing) {
  run_ranks(2, [](World world) {
    MemoryRank r(world, 4, {}, {.placements = zero3("dp")});
    r.step();
    auto counter = std::make_shared<CountingReporter>();
    c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, counter);
    std::int64_t after_first = 0;
    for (int i = 0; i < 10; ++i) {
      for (auto& [name, leaf] : r.context->named_parameters()) (void)r.context->full_parameter(name);
      if (i == 0) after_first = counter->live;
    }
    EXPECT_EQ(counter->live, after_first);
  });
}

TEST(Memory, OneUnitsGradientsAreWholeAtThePeakAndNoMore) {
  run_ranks(2, [](World world) {
    MemoryRank one(world, 1, {}, {.placements = zero3("dp")});
    one.step();
    const auto report = one.context->memory_report();
    EXPECT_EQ(report.reduce_slots_peak, Bytes(unit_elements(2) * 4));  // the whole unit's gradients, besides the shard
    EXPECT_EQ(report.main_gradients, Bytes(unit_elements(2) * 4 / 2));
    EXPECT_NE(to_string(report).find("reduce slots"), std::string::npos);
  });
}

TEST(Memory, NestedUnitsAddTheirParentAndStayFlatInDepth) {
  std::map<int, MemoryReport> by_depth;
  for (int depth : {3, 9}) {
    run_ranks(2, [&](World world) {
      auto context = FsdpContext::create(DeviceMesh(world, {{"dp", 2}}));
      auto model = make_toy_model(7, depth);
      shard_toy_model(*context, model, {});
      toy_loss(model, 1).backward();
      const auto report = context->memory_report();
      Bytes shards, largest;
      for (const auto& unit : context->units()) {
        for (const auto& group : unit->groups()) shards += bytes_of(group->layout().padded_size(), 4);
        if (unit->name() != "<root>") largest = std::max(largest, unit->gathered_bytes());
      }
      const Bytes root = context->unit("<root>").gathered_bytes();
      EXPECT_EQ(report.main_weights, Bytes(shards.value() / 2));
      EXPECT_EQ(report.model_weights, Bytes(0));
      EXPECT_EQ(report.main_gradients, report.main_weights);
      EXPECT_EQ(report.gathered, Bytes(0));
      EXPECT_EQ(report.gathered_peak, root + largest * 2);      // the root, the unit that computes and the next
      EXPECT_LE(report.reduce_slots_peak, root + largest * 2);  // the root's gradients, two slots
      if (world.rank().value() == 0) by_depth[depth] = report;
    });
  }
  EXPECT_EQ(by_depth[3].gathered_peak, by_depth[9].gathered_peak);
  EXPECT_EQ(by_depth[3].reduce_slots_peak, by_depth[9].reduce_slots_peak);
}

TEST(Memory, ZeroGradFreesGradientMemory) {
  run_toy(2, [](ToyRank& r) {
    Sgd optimizer(*r.context, {});
    toy_loss(r.model, 1).backward();
    EXPECT_GT(r.context->memory_report().main_gradients, Bytes(0));
    optimizer.zero_grad();
    EXPECT_EQ(r.context->memory_report().main_gradients, Bytes(0));
    // By any torch optimizer: at the next forward.
    toy_loss(r.model, 1).backward();
    for (auto& p : r.context->parameters()) p.mutable_grad().reset();
    at::NoGradGuard no_grad;
    (void)toy_loss(r.model, 1);
    EXPECT_EQ(r.context->memory_report().main_gradients, Bytes(0));
  });
}

}  // namespace
}  // namespace fsdp::testing
