#include "fsdp/runtime/simulated/simulated_runtime.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "fsdp/base/error.h"

namespace fsdp::testing {
namespace {

// One flop and one byte a nanosecond: modelled times are the counts themselves.
CostModel unit_costs() {
  return {
      .flops_per_second = 1e9, .memory_bytes_per_second = 1e9, .link_bytes_per_second = 1e9, .collective_latency = 0};
}

// Memory as good as free: only products count.
CostModel product_costs() {
  auto costs = unit_costs();
  costs.memory_bytes_per_second = 1e18;
  return costs;
}

at::Tensor meta(std::vector<std::int64_t> sizes, bool requires_grad = false) {
  return torch::empty(sizes, torch::TensorOptions().device(torch::kMeta).requires_grad(requires_grad));
}

trace::Nanoseconds cost_of(const std::shared_ptr<SimulatedRuntime>& runtime, const std::function<void()>& work) {
  const auto before = runtime->compute_stream().now();
  work();
  return runtime->compute_stream().now() - before;
}

TEST(SimulatedRuntime, StartsAtZeroOnTheMetaDevice) {
  const auto runtime = make_simulated_runtime(unit_costs());
  EXPECT_EQ(runtime->device(), c10::Device(c10::kMeta));
  EXPECT_EQ(runtime->compute_stream().now(), 0);
  EXPECT_EQ(runtime->allocate(Bytes(1 << 30), runtime->compute_stream()).get(), nullptr);
}

TEST(SimulatedRuntime, AProductCostsTwoFlopsATerm) {
  const auto runtime = make_simulated_runtime(product_costs());
  const auto a = meta({30, 40}), b = meta({40, 50}), bias = meta({50}), batch = meta({7, 30, 40}),
             others = meta({7, 40, 50});
  EXPECT_EQ(cost_of(runtime, [&] { (void)at::mm(a, b); }), 2 * 30 * 40 * 50);
  EXPECT_EQ(cost_of(runtime, [&] { (void)at::addmm(bias, a, b); }), 2 * 30 * 40 * 50);
  EXPECT_EQ(cost_of(runtime, [&] { (void)at::bmm(batch, others); }), 7 * 2 * 30 * 40 * 50);
}

TEST(SimulatedRuntime, APointwiseOperatorCostsItsTraffic) {
  const auto runtime = make_simulated_runtime(unit_costs());
  const auto a = meta({1000}), b = meta({1000});
  EXPECT_EQ(cost_of(runtime, [&] { (void)at::add(a, b); }), 3 * 4000);
  EXPECT_EQ(cost_of(runtime, [&] { (void)at::neg(a); }), 2 * 4000);
}

TEST(SimulatedRuntime, ViewsAndAllocationsAreFree) {
  const auto runtime = make_simulated_runtime(unit_costs());
  const auto a = meta({10, 20});
  EXPECT_EQ(cost_of(runtime,
                    [&] {
                      (void)a.t();
                      (void)a.view({200}).slice(0, 3, 9).unsqueeze(0);
                      (void)at::empty_like(a);
                      (void)a.transpose(0, 1).select(0, 1);
                    }),
            0);
}

TEST(SimulatedRuntime, CompositeOperatorsAreNotChargedTwice) {
  const auto runtime = make_simulated_runtime(product_costs());
  const auto x = meta({6, 40}), x3 = meta({2, 3, 40}), w = meta({50, 40}), b = meta({50});
  EXPECT_EQ(cost_of(runtime, [&] { (void)at::linear(x, w, b); }), 2 * 6 * 40 * 50);
  EXPECT_EQ(cost_of(runtime, [&] { (void)at::linear(x3, w); }), 2 * 6 * 40 * 50);
  EXPECT_EQ(cost_of(runtime, [&] { (void)at::matmul(x3, w.t()); }), 2 * 6 * 40 * 50);
}

TEST(SimulatedRuntime, AttentionIsTwoProductsAndItsBackwardTwoAndAHalfTimesThat) {
  const auto runtime = make_simulated_runtime(product_costs());
  const auto q = meta({2, 4, 16, 8}, true), k = meta({2, 4, 16, 8}, true), v = meta({2, 4, 16, 8}, true);
  constexpr std::int64_t kForward = 4 * (2 * 4 * 16 * 8) * 16;
  at::Tensor out;
  EXPECT_EQ(cost_of(runtime, [&] { out = at::scaled_dot_product_attention(q, k, v, {}, 0.0, true); }), kForward);
  EXPECT_EQ(out.sizes(), q.sizes());
  const auto gradient = at::empty_like(out);
  EXPECT_EQ(cost_of(runtime, [&] { out.backward(gradient); }), kForward * 5 / 2);
  EXPECT_EQ(v.grad().sizes(), v.sizes());
}

TEST(SimulatedRuntime, NormsAreOneOperator) {
  const auto runtime = make_simulated_runtime(unit_costs());
  const auto x = meta({8, 100}), w = meta({100});
  EXPECT_EQ(cost_of(runtime, [&] { (void)at::rms_norm(x, {100}, w); }), 2 * 3200 + 400);
}

TEST(SimulatedRuntime, StreamsOverlapAndEventsOrderThem) {
  const auto runtime = make_simulated_runtime(unit_costs());
  const Stream compute = runtime->compute_stream(), a = runtime->make_stream("a"), b = runtime->make_stream("b");
  const auto spend = [&](const Stream& stream, trace::Nanoseconds duration) {
    stream.enqueue([&runtime, duration] { runtime->spend(duration); });
  };
  spend(a, 100);
  spend(b, 30);
  EXPECT_EQ(a.now(), 100);
  EXPECT_EQ(b.now(), 30) << "independent";
  EXPECT_EQ(compute.now(), 0);
  Event event;
  a.record(event);
  spend(a, 50);  // after the mark
  b.wait(event);
  spend(b, 7);
  EXPECT_EQ(b.now(), 107);
  EXPECT_EQ(a.now(), 150);
  compute.wait(event);
  runtime->spend(1);
  EXPECT_EQ(compute.now(), 101);
  Event late;
  b.record(late);
  compute.wait(event);  // already passed: no time
  EXPECT_EQ(compute.now(), 101);
}

TEST(SimulatedRuntime, OperatorsInsideATaskCostTimeOnItsStream) {
  const auto runtime = make_simulated_runtime(product_costs());
  const Stream side = runtime->make_stream("side");
  const auto a = meta({10, 10});
  side.enqueue([&] { (void)at::mm(a, a); });
  EXPECT_EQ(side.now(), 2000);
  EXPECT_EQ(runtime->compute_stream().now(), 0);
  (void)at::mm(a, a);
  EXPECT_EQ(runtime->compute_stream().now(), 2000);
}

TEST(SimulatedRuntime, SynchronizeMovesTheHostAndWithItWhatIsEnqueuedLater) {
  const auto runtime = make_simulated_runtime(unit_costs());
  const Stream a = runtime->make_stream("a"), b = runtime->make_stream("b");
  a.enqueue([&] { runtime->spend(100); });
  Event event;
  a.record(event);
  EXPECT_FALSE(event.query());
  event.synchronize();
  EXPECT_TRUE(event.query());
  b.enqueue([&] { runtime->spend(5); });
  EXPECT_EQ(b.now(), 105);
}

TEST(SimulatedRuntime, LaunchTimeBoundsTheDeviceFromBelow) {
  auto costs = product_costs();
  costs.launch = 10'000;
  const auto runtime = make_simulated_runtime(costs);
  const auto a = meta({10, 10});
  for (int i = 0; i < 5; ++i) (void)at::mm(a, a);
  EXPECT_EQ(runtime->compute_stream().now(), 5 * 10'000 + 2000);
}

TEST(SimulatedRuntime, SpansHaveTheVirtualTimesOfTheirTasksAndOperators) {
  const auto runtime = make_simulated_runtime(product_costs());
  auto recorder = std::make_shared<trace::Recorder>();
  runtime->set_recorder(recorder);
  const Stream side = runtime->make_stream("side");
  trace::Span* span = recorder->issue("gather", trace::Kind::all_gather, side.id());
  side.enqueue([&] { runtime->spend(40); });
  side.enqueue([&] { runtime->spend(2); }, {.span = span});
  const auto a = meta({10, 10});
  (void)at::mm(a, a);
  EXPECT_EQ(span->begin, 40);
  EXPECT_EQ(span->end, 42);
  const auto spans = recorder->spans();
  ASSERT_EQ(spans.size(), 2u);
  EXPECT_STREQ(spans[1].name, "aten::mm");
  EXPECT_EQ(spans[1].kind, trace::Kind::compute);
  EXPECT_EQ(spans[1].begin, 0);
  EXPECT_EQ(spans[1].end, 2000);
}

// A small model's whole step; returns when the last operator ends.
trace::Nanoseconds train_once(trace::Nanoseconds* forward = nullptr) {
  const auto runtime = make_simulated_runtime(unit_costs());
  const auto table = meta({100, 32}, true), gain = meta({32}, true), shift = meta({32}, true),
             qkv = meta({96, 32}, true), head = meta({100, 32}, true);
  const auto tokens = torch::empty({2, 16}, torch::TensorOptions().device(torch::kMeta).dtype(torch::kLong));
  auto x = torch::embedding(table, tokens);
  x = torch::silu(x * gain + shift);
  const auto parts = torch::linear(x, qkv).view({2, 16, 3, 4, 8}).permute({2, 0, 3, 1, 4}).unbind(0);
  x = x + torch::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, true)
              .transpose(1, 2)
              .reshape({2, 16, 32});
  x = torch::rms_norm(x, {32}, gain);
  const auto loss = torch::nn::functional::cross_entropy(torch::linear(x, head).view({32, 100}), tokens.view({32}));
  if (forward != nullptr) *forward = runtime->compute_stream().now();
  loss.backward();
  for (const auto& weight : {table, gain, shift, qkv, head}) EXPECT_EQ(weight.grad().sizes(), weight.sizes());
  return runtime->compute_stream().now();
}

TEST(SimulatedRuntime, AWholeStepRunsOnMetaAndSpendsTimeBothWays) {
  trace::Nanoseconds forward = 0;
  const auto both = train_once(&forward);
  EXPECT_GT(forward, 2 * 32 * 32 * 96 + 2 * 32 * 32 * 100) << "at least the two products";
  EXPECT_GT(both - forward, forward) << "backward is the larger part";
}

TEST(SimulatedRuntime, LayerNormAndReluRunBothWays) {
  const auto runtime = make_simulated_runtime(unit_costs());
  const auto x = meta({4, 32}, true), gain = meta({32}, true), shift = meta({32}, true);
  const auto y = torch::relu(torch::layer_norm(x, {32}, gain, shift));
  EXPECT_EQ(y.sizes(), x.sizes());
  const auto forward = runtime->compute_stream().now();
  EXPECT_GT(forward, 0);
  y.sum().backward();
  EXPECT_GT(runtime->compute_stream().now(), forward);
  EXPECT_EQ(x.grad().sizes(), x.sizes());
  EXPECT_EQ(gain.grad().sizes(), gain.sizes());
  EXPECT_EQ(shift.grad().sizes(), shift.sizes());
}

TEST(SimulatedRuntime, IsDeterministic) {
  const auto first = train_once();
  EXPECT_EQ(train_once(), first);
  EXPECT_EQ(train_once(), first);
}

TEST(SimulatedRuntime, IsOneAThread) {
  auto runtime = make_simulated_runtime(unit_costs());
  try {
    (void)make_simulated_runtime(unit_costs());
    FAIL() << "no error";
  } catch (const UsageError& error) {
    EXPECT_STREQ(error.what(), "this thread already has a simulated runtime; destroy it first");
  }
  // The first one still counts, and another thread may have its own.
  EXPECT_EQ(cost_of(runtime, [&] { (void)at::neg(meta({10})); }), 80);
  std::thread([] {
    const auto own = make_simulated_runtime(unit_costs());
    EXPECT_EQ(cost_of(own, [&] { (void)at::neg(meta({1000})); }), 8000);
  }).join();
  EXPECT_EQ(runtime->compute_stream().now(), 80);
  runtime.reset();
  EXPECT_EQ(cost_of(make_simulated_runtime(unit_costs()), [] {}), 0) << "a new one after the old is gone";
}

TEST(SimulatedRuntime, CostsNothingOnceItIsGone) {
  {
    const auto runtime = make_simulated_runtime(unit_costs());
    (void)at::neg(meta({10}));
    EXPECT_EQ(runtime->compute_stream().now(), 80);
  }
  (void)at::neg(meta({10}));  // must not touch what is gone
  const auto runtime = make_simulated_runtime(unit_costs());
  EXPECT_EQ(runtime->compute_stream().now(), 0);
}

TEST(CostModel, TakesTheSlowerOfArithmeticAndMemory) {
  const CostModel costs{
      .flops_per_second = 2e9, .memory_bytes_per_second = 4e9, .link_bytes_per_second = 1e9, .collective_latency = 7};
  EXPECT_EQ(costs.compute(1000, 100), 500);
  EXPECT_EQ(costs.compute(100, 4000), 1000);
  EXPECT_EQ(costs.transfer(1000, 2), 1007);
  EXPECT_EQ(costs.transfer(1000, 1), 0);
}

}  // namespace
}  // namespace fsdp::testing
