// Mixtures of experts under the merged schedule on one GPU: rank 0 of several on a loopback.
#include <ATen/ops/allclose.h>
#include <ATen/ops/randint.h>
#include <torch/csrc/autograd/custom_function.h>

#include "fsdp/pipeline/step_driver.h"
#include "models/moe_transformer.h"
#include "tests/gpu/gpu.h"
#include "tests/gpu/moe_gpu.h"

namespace fsdp::testing {
namespace {

// Axes "edp" of one rank and "ep" of all, whose gathers and reductions are held up.
DeviceMesh slow_moe_mesh(const World& world, std::int64_t gather_nanoseconds, std::int64_t reduce_nanoseconds) {
  const DeviceMesh slow = slow_mesh(world, gather_nanoseconds, reduce_nanoseconds);
  const std::vector<int> self{static_cast<int>(world.rank().value())};
  const auto own = [&](const char* name, GroupUse use) { return world.create_communicator(self, name, use); };
  return DeviceMesh(world, {"edp", "ep"},
                    {{own("edp.gather", GroupUse::gather), own("edp.reduce", GroupUse::reduce)},
                     {slow.communicator(0, Use::gather), slow.communicator(0, Use::reduce)}});
}

using pipeline::Schedule;

TEST(GpuMoe, MergedEqualsSequentialAndTheCpu) {
  const auto train = [](const World& world, const pipeline::StepOptions& options) {
    MoeGpuRun run(world, DeviceMesh(world, {{"edp", 1}, {"ep", 1}}), options);
    Sgd optimizer(*run.context, {.learning_rate = 0.1, .momentum = 0.9});
    for (int step = 0; step < 3; ++step) {
      run.driver->run(run.batches(3, static_cast<std::uint64_t>(step)));
      optimizer.step(clip_grad_norm_(*run.context, 1.0));
      optimizer.zero_grad();
    }
    return run.weights();
  };
  const auto cpu = train(World::single(), {.schedule = Schedule::sequential});
  const World world = World::single({.device = DeviceKind::cuda});
  const auto sequential = train(world, {.schedule = Schedule::sequential, .delay_weights = false});
  for (std::size_t i = 0; i < cpu.size(); ++i) EXPECT_TRUE(at::allclose(sequential[i], cpu[i], 1e-4, 1e-5)) << i;
  for (const bool delay : {false, true}) {
    for (const bool early : {false, true}) {
      const auto merged = train(world, {.delay_weights = delay, .release_early = early});
      for (std::size_t i = 0; i < merged.size(); ++i)
        EXPECT_TRUE(at::allclose(merged[i], sequential[i], 1e-5, 1e-6)) << i;  // attention's backward varies
    }
  }
}

// Attention by plain products, which give the same bits in every run.
class PlainAttention {
 public:
  PlainAttention() { set(false); }
  ~PlainAttention() { set(true); }

 private:
  static void set(bool fused) {
    at::globalContext().setSDPUseFlash(fused);
    at::globalContext().setSDPUseMemEfficient(fused);
    at::globalContext().setSDPUseCuDNN(fused);
  }
};

// Holds up the current stream in forward and in backward.
struct Spin : torch::autograd::Function<Spin> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, std::int64_t kernels,
                            std::int64_t nanoseconds) {
    context->saved_data["kernels"] = kernels;
    context->saved_data["nanoseconds"] = nanoseconds;
    reinterpret_cast<Kernels*>(kernels)->spin(nanoseconds, 1);
    return x.view_as(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    reinterpret_cast<Kernels*>(context->saved_data["kernels"].toInt())
        ->spin(context->saved_data["nanoseconds"].toInt(), 1);
    return {gradients[0], at::Tensor(), at::Tensor()};
  }
};

// A model whose exchanges are held up before and after, on the stream of exchanges.
class SlowExchanges final : public pipeline::StagedModel {
 public:
  SlowExchanges(std::shared_ptr<models::MoeTransformer> inner, Kernels& kernels, std::int64_t nanoseconds)
      : inner_(std::move(inner)), kernels_(kernels), nanoseconds_(nanoseconds) {}
  [[nodiscard]] int layers() const override { return inner_->layers(); }
  [[nodiscard]] bool dense(int layer) const override { return inner_->dense(layer); }
  [[nodiscard]] LayerFunctions layer_functions(int layer, double loss_scale) override {
    LayerFunctions f = inner_->layer_functions(layer, loss_scale);
    if (dense(layer)) return f;
    f.dispatch = slow(std::move(f.dispatch));
    f.combine = slow(std::move(f.combine));
    return f;
  }
  [[nodiscard]] pipeline::NodeFunction pre_function() override { return inner_->pre_function(); }
  [[nodiscard]] pipeline::NodeFunction post_function() override { return inner_->post_function(); }
  [[nodiscard]] pipeline::NodeFunction loss_function() override { return inner_->loss_function(); }
  [[nodiscard]] std::vector<FsdpModule*> units(pipeline::NodeKind node, int layer) const override {
    return inner_->units(node, layer);
  }
  [[nodiscard]] std::shared_ptr<moe::ExpertExchange> exchange() const override { return inner_->exchange(); }

 private:
  pipeline::NodeFunction slow(pipeline::NodeFunction f) const {
    return [f = std::move(f), kernels = reinterpret_cast<std::int64_t>(&kernels_), n = nanoseconds_](
               const pipeline::Tensors& in, pipeline::Carry& carry) {
      pipeline::Tensors held = in;
      held[0] = Spin::apply(in[0], kernels, n);
      pipeline::Tensors out = f(held, carry);
      out[0] = Spin::apply(out[0], kernels, n / 2);
      return out;
    };
  }
  const std::shared_ptr<models::MoeTransformer> inner_;
  Kernels& kernels_;
  const std::int64_t nanoseconds_;
};

// Spins on every stream in turn: a missing wait shows.
TEST(GpuMoe, SpinsChangeNoBit) {
  const PlainAttention plain;
  constexpr std::int64_t kSpin = 1'500'000;  // ns
  const World world = World::loopback({.size = 4});
  const auto train = [&](std::int64_t gather, std::int64_t reduce, std::int64_t exchange) {
    MoeGpuRun run(world, slow_moe_mesh(world, gather, reduce), {});
    run.driver.reset();  // one driver a context
    run.driver = std::make_unique<pipeline::StepDriver>(
        run.context, std::make_shared<SlowExchanges>(run.model, *world.runtime()->kernels(), exchange),
        pipeline::StepOptions{});
    Sgd optimizer(*run.context, {.learning_rate = 0.1});
    for (int step = 0; step < 2; ++step) {
      run.driver->run(run.batches(3, static_cast<std::uint64_t>(step)));
      optimizer.step();
      optimizer.zero_grad();
    }
    return run.weights();
  };
  const auto expected = train(0, 0, 0);
  expect_equal(train(0, 0, 0), expected, "run again");
  struct Spins {
    std::int64_t gather, reduce, exchange;
  };
  for (const auto& [gather, reduce, exchange] : {Spins{kSpin, 0, 0}, Spins{0, kSpin, 0}, Spins{kSpin, kSpin, 0},
                                                 Spins{0, 0, kSpin}, Spins{kSpin, kSpin, kSpin}}) {
    const auto got = train(gather, reduce, exchange);
    for (std::size_t i = 0; i < got.size(); ++i)
      EXPECT_TRUE(at::equal(got[i], expected[i]))
          << i << ", gathers " << gather << ", reductions " << reduce << ", exchanges " << exchange << ": differs by "
          << (got[i] - expected[i]).abs().max().item<double>();
  }
}

TEST(GpuMoe, NothingGrowsOverSteps) {
  const World world = World::loopback({.size = 4});
  MoeGpuRun run(world, DeviceMesh(world, {{"edp", 2}, {"ep", 2}}), {});
  AdamW optimizer(*run.context, {.learning_rate = 1e-3});
  std::int64_t before = 0;
  for (int step = 0; step <= 200; ++step) {
    run.driver->run(run.batches(4, static_cast<std::uint64_t>(step % 3)));
    optimizer.step(clip_grad_norm_(*run.context, 1.0));
    optimizer.zero_grad();
    if (step != 20) continue;
    world.runtime()->compute_stream().synchronize();
    before = world.runtime()->device_memory().in_use.value();
  }
  world.runtime()->compute_stream().synchronize();
  // After the same tokens as at step 20. What exchanges hold until the host sees that they are over varies by a few
  // blocks; a smallest block a step would be 90 KiB.
  EXPECT_LT(world.runtime()->device_memory().in_use.value(), before + 180 * 512);
}

}  // namespace
}  // namespace fsdp::testing
