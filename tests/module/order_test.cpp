// The exact order of operations that the host issues: unshard, compute, reshard, reduce, under each policy.
#include <ATen/ops/empty.h>
#include <ATen/ops/randn.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "tests/support/stack_model.h"
#include "tests/support/toy_model.h"

namespace fsdp::testing {
namespace {

// "unshard layers.0, forward layers.0, ..." for one microbatch.
std::string sequence(trace::Recorder& recorder) {
  std::string text;
  for (const auto& span : recorder.spans()) {
    std::string name = span.name;
    if (!name.starts_with("FSDP:") || trace::is_communication(span.kind)) continue;
    name = name.substr(5);
    const auto colon = name.rfind(':');
    std::string operation = name.substr(colon + 1);
    if (operation == "forward_compute") operation = "forward";
    if (operation == "backward_compute") operation = "backward";
    if (operation == "reduce_gradients") operation = "reduce";
    text += (text.empty() ? "" : ", ") + operation + " " + name.substr(0, colon);
  }
  return text;
}

struct NestedRun {
  std::shared_ptr<trace::Recorder> recorder = std::make_shared<trace::Recorder>();

  std::string operator()(ContextOptions options, Strategy strategy = zero3("dp"), int steps = 1) {
    options.recorder = recorder;
    std::string result;
    run_ranks(1, [&](World world) {
      auto context = FsdpContext::create(DeviceMesh(world, {{"dp", 1}}), options);
      ToyModel model(5, 8, 16, 2);
      shard_toy_model(*context, model, {.placements = strategy});
      for (int step = 0; step < steps; ++step) {
        recorder->clear();
        fsdp::call(model, &ToyModelImpl::loss, at::randn({2, 5}), at::randn({2, 3})).backward();
        result = sequence(*recorder);
      }
    });
    return result;
  }
};

TEST(Order, NestedTreeWithPrefetchOfOne) {
  EXPECT_EQ(NestedRun()({}),
            "unshard <root>, unshard blocks.0, forward <root>, unshard blocks.1, forward blocks.0, reshard blocks.0, "
            "forward blocks.1, "
            "backward <root>, unshard blocks.0, backward blocks.1, reduce blocks.1, reshard blocks.1, "
            "backward blocks.0, reduce blocks.0, reshard blocks.0, reduce <root>, reshard <root>");
}

TEST(Order, WithoutPrefetchOrKeepLast) {
  ContextOptions options;
  options.prefetch = Prefetch::none();
  options.keep_last = false;
  EXPECT_EQ(NestedRun()(options),
            "unshard <root>, forward <root>, unshard blocks.0, forward blocks.0, reshard blocks.0, unshard blocks.1, "
            "forward blocks.1, reshard blocks.1, "
            "backward <root>, unshard blocks.1, backward blocks.1, reduce blocks.1, reshard blocks.1, "
            "unshard blocks.0, backward blocks.0, reduce blocks.0, reshard blocks.0, reduce <root>, reshard <root>");
}

TEST(Order, DelayedReleaseIssuesTheNextGatherFirst) {
  ContextOptions options;
  options.prefetch = Prefetch::delayed_release(1);
  EXPECT_EQ(NestedRun()(options),
            "unshard <root>, forward <root>, unshard blocks.0, forward blocks.0, unshard blocks.1, forward blocks.1, "
            "backward <root>, backward blocks.1, reduce blocks.1, reshard blocks.0, unshard blocks.0, backward "
            "blocks.0, reduce blocks.0, reshard blocks.1, "
            "reduce <root>, reshard blocks.0, reshard <root>");
}

TEST(Order, DelayedReductionFollowsTheNextGatherOfBackward) {
  ContextOptions options;
  options.prefetch = Prefetch::none();
  options.reduction = Reduction::delayed(1);
  EXPECT_EQ(NestedRun()(options),
            "unshard <root>, forward <root>, unshard blocks.0, forward blocks.0, reshard blocks.0, unshard blocks.1, "
            "forward blocks.1, "
            "backward <root>, backward blocks.1, reshard blocks.1, "
            "unshard blocks.0, reduce blocks.1, backward blocks.0, reshard blocks.0, reduce blocks.0, "
            "reduce <root>, reshard <root>");
}

TEST(Order, RecordedOrderPrefetchesFromTheSecondIterationOn) {
  ContextOptions options;
  options.prefetch = Prefetch::recorded(1);
  options.keep_last = false;
  EXPECT_EQ(
      NestedRun()(options, zero3("dp"), 2),
      "unshard <root>, unshard blocks.0, forward <root>, unshard blocks.1, forward blocks.0, reshard blocks.0, forward "
      "blocks.1, reshard blocks.1, "
      "unshard blocks.1, backward <root>, unshard blocks.0, backward blocks.1, reduce blocks.1, reshard blocks.1, "
      "backward blocks.0, reduce blocks.0, reshard blocks.0, reduce <root>, reshard <root>");
}

TEST(Order, ReplicatedWeightsAreNeverDropped) {
  EXPECT_EQ(NestedRun()({}, ddp("dp")),
            "unshard <root>, unshard blocks.0, forward <root>, unshard blocks.1, forward blocks.0, forward blocks.1, "
            "backward <root>, backward blocks.1, reduce blocks.1, backward blocks.0, reduce blocks.0, reduce <root>");
}

TEST(Order, TwoRootsShareOneOrder) {
  auto recorder = std::make_shared<trace::Recorder>();
  ContextOptions options;
  options.recorder = recorder;
  run_ranks(1, [&](World world) {
    auto context = FsdpContext::create(DeviceMesh(world, {{"dp", 1}}), options);
    Stack first(2, 4, at::kCPU), second(2, 4, at::kCPU);
    shard_stack(*context, first, {});
    shard_stack(*context, second, {});
    EXPECT_EQ(context->forward_order(),
              (std::vector<std::string>{"<root>", "layers.0", "layers.1", "#1/<root>", "#1/layers.0", "#1/layers.1"}));
    EXPECT_EQ(context->backward_order(),
              (std::vector<std::string>{"#1/<root>", "#1/layers.1", "#1/layers.0", "<root>", "layers.1", "layers.0"}));
    second->forward(first->forward(at::randn({2, 4}))).sum().backward();
    EXPECT_EQ(sequence(*recorder),
              "unshard layers.0, forward <root>, unshard layers.1, forward layers.0, reshard layers.0, "
              "unshard #1/layers.0, forward layers.1, reshard layers.1, "
              "forward #1/<root>, unshard #1/layers.1, forward #1/layers.0, reshard #1/layers.0, forward #1/layers.1, "
              "backward #1/<root>, unshard #1/layers.0, backward #1/layers.1, reduce #1/layers.1, reshard #1/layers.1, "
              "unshard layers.1, backward #1/layers.0, reduce #1/layers.0, reshard #1/layers.0, "
              "backward <root>, unshard layers.0, backward layers.1, reduce layers.1, reshard layers.1, "
              "backward layers.0, reduce layers.0, reshard layers.0");
  });
}

TEST(Order, PrefetchListsGatherWhatTheUserNames) {
  auto recorder = std::make_shared<trace::Recorder>();
  ContextOptions options;
  options.recorder = recorder;
  options.prefetch = Prefetch::lists();
  options.keep_last = false;
  run_ranks(1, [&](World world) {
    auto context = FsdpContext::create(DeviceMesh(world, {{"dp", 1}}), options);
    Stack model(3, 4, at::kCPU);
    shard_stack(*context, model, {});
    context->unit("layers.0").set_forward_prefetch({&context->unit("layers.1"), &context->unit("layers.2")});
    context->unit("layers.2").set_backward_prefetch({&context->unit("layers.0")});
    model->forward(at::randn({2, 4})).sum().backward();
    EXPECT_EQ(
        sequence(*recorder),
        "forward <root>, unshard layers.0, unshard layers.1, unshard layers.2, forward layers.0, reshard layers.0, "
        "forward layers.1, "
        "reshard layers.1, forward layers.2, reshard layers.2, backward <root>, unshard layers.2, unshard layers.0, "
        "backward layers.2, "
        "reduce layers.2, reshard layers.2, unshard layers.1, backward layers.1, reduce layers.1, reshard layers.1, "
        "backward layers.0, reduce layers.0, reshard layers.0");
  });
}

}  // namespace
}  // namespace fsdp::testing
