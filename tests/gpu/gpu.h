// What the GPU tests share. They end with an error, not with a skip, where there is no GPU: whoever starts them wants
// one.
#pragma once

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/square.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/modulelist.h>

#include <map>

#include "fsdp/fsdp.h"
#include "fsdp/runtime/kernels.h"
#include "tests/support/train.h"

namespace fsdp::testing {

inline const c10::Device kGpu{c10::kCUDA, 0};

// LibTorch learns of CUDA when the first runtime is made.
class GpuEnvironment final : public ::testing::Environment {
 public:
  void SetUp() override { runtime_ = make_cuda_runtime(0); }

 private:
  std::shared_ptr<Runtime> runtime_;
};

inline at::Tensor random_on_gpu(at::IntArrayRef sizes, std::uint64_t seed) { return random(sizes, seed).to(kGpu); }

// Linear layers one after the other, each a unit: the same bits in every run (no attention, no atomic sums).
struct GpuLayerImpl : torch::nn::Module {
  GpuLayerImpl(std::int64_t width, std::uint64_t seed)
      : fc(register_module("fc", fsdp::nn::Linear(torch::nn::LinearOptions(width, width)))) {
    at::NoGradGuard no_grad;
    fc->weight.copy_(random({width, width}, seed) / std::sqrt(static_cast<double>(width)));
    fc->bias.copy_(random({width}, seed + 1) * 0.1);
    gain = register_parameter("gain", at::ones({width}) + random({width}, seed + 2) * 0.1);
  }
  at::Tensor forward(at::Tensor x) { return at::relu(fc->forward(x * gain)) + x; }
  fsdp::nn::Linear fc;
  at::Tensor gain;
};
FSDP_MODULE(GpuLayer);

struct GpuStackImpl : torch::nn::Module {
  GpuStackImpl(int depth, std::int64_t width) {
    for (int i = 0; i < depth; ++i) layers->push_back(GpuLayer(width, 10 * static_cast<std::uint64_t>(i) + 1));
    register_module("layers", layers);
  }
  at::Tensor forward(at::Tensor x) {
    for (std::size_t i = 0; i < layers->size(); ++i) {
      if (static_cast<int>(i) != skipped) x = layers->ptr<fsdp::Hooked<GpuLayerImpl>>(i)->forward(x);
    }
    return x;
  }
  at::Tensor loss(at::Tensor x) { return at::mean(at::square(forward(x).to(at::kFloat))); }
  torch::nn::ModuleList layers;
  int skipped = -1;  // layer that takes no part
};
FSDP_MODULE(GpuStack);

// Sharded training of a stack on whatever world; every result is deterministic.
struct GpuRun {
  GpuRun(World world, ContextOptions options = {}, UnitOptions unit = {}, int depth = 4, std::int64_t width = 64)
      : GpuRun(world, DeviceMesh(world, {{"dp", world.size()}}), options, unit, depth, width) {}
  GpuRun(World world, const DeviceMesh& mesh, ContextOptions options, UnitOptions unit, int depth, std::int64_t width)
      : world(world), context(FsdpContext::create(mesh, options)), model(depth, width), width(width) {
    for (auto& layer : *model->layers) context->fully_shard(layer, unit);
    context->fully_shard(model, unit);
    context->finalize();
  }
  at::Tensor loss(std::uint64_t seed) {
    const auto prepared = inputs.find(seed);
    return fsdp::call(model, &GpuStackImpl::loss, prepared == inputs.end() ? input(seed) : prepared->second);
  }
  at::Tensor input(std::uint64_t seed) const {
    const auto rank = static_cast<std::uint64_t>(world.rank().value());
    return random({8, width}, seed * 100 + rank).to(world.runtime()->device());
  }
  // Copies the inputs of seeds below `count` now: a copy from the host waits for what the device is doing.
  void prepare_inputs(std::uint64_t count) {
    for (std::uint64_t seed = 0; seed < count; ++seed) inputs[seed] = input(seed);
  }
  // Every whole parameter, on the CPU.
  std::vector<at::Tensor> weights() {
    std::vector<at::Tensor> all;
    for (auto& [name, leaf] : context->named_parameters()) all.push_back(context->full_parameter(name).to(at::kCPU));
    return all;
  }
  World world;
  std::shared_ptr<FsdpContext> context;
  GpuStack model;
  std::int64_t width;
  std::map<std::uint64_t, at::Tensor> inputs;
};

// A group that holds up its stream before every operation.
class SlowGroup final : public CommunicatorBackend {
 public:
  SlowGroup(std::shared_ptr<CommunicatorBackend> inner, Kernels& kernels, std::int64_t nanoseconds)
      : inner_(std::move(inner)), kernels_(kernels), nanoseconds_(nanoseconds) {}
  void execute(const Collective& operation) override {
    kernels_.spin(nanoseconds_, 1);
    inner_->execute(operation);
    kernels_.spin(nanoseconds_ / 2, 1);
  }
  void abort(const std::string& reason) override { inner_->abort(reason); }
  void reset() override { inner_->reset(); }
  [[nodiscard]] Bytes peer_granularity() const override { return inner_->peer_granularity(); }
  [[nodiscard]] std::shared_ptr<PeerMemory> make_peer_memory(const std::vector<PeerPart>& parts, Kernels& kernels,
                                                             std::string& why) override {
    return inner_->make_peer_memory(parts, kernels, why);
  }
  [[nodiscard]] std::unique_ptr<PeerInbox> make_inbox(Bytes largest_share, Kernels& kernels,
                                                      std::string& why) override {
    return inner_->make_inbox(largest_share, kernels, why);
  }

 private:
  std::shared_ptr<CommunicatorBackend> inner_;
  Kernels& kernels_;
  std::int64_t nanoseconds_;
};

// A mesh of one axis whose gathers, or reductions, are held up.
inline DeviceMesh slow_mesh(const World& world, std::int64_t gather_nanoseconds, std::int64_t reduce_nanoseconds) {
  std::vector<int> ranks;
  for (int r = 0; r < world.size(); ++r) ranks.push_back(r);
  const auto slow = [&](GroupUse use, std::int64_t nanoseconds) {
    const auto plain = world.create_communicator(ranks, use == GroupUse::gather ? "dp.gather" : "dp.reduce", use);
    if (nanoseconds == 0) return plain;
    return Communicator(std::make_shared<SlowGroup>(plain.backend(), *world.runtime()->kernels(), nanoseconds),
                        world.runtime(), plain.rank(), plain.size(), plain.name());
  };
  return DeviceMesh(world, {"dp"},
                    {{slow(GroupUse::gather, gather_nanoseconds), slow(GroupUse::reduce, reduce_nanoseconds),
                      world.host().create_communicator(ranks, "dp.host")}});
}

inline void expect_equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b, const std::string& what) {
  ASSERT_EQ(a.size(), b.size()) << what;
  for (std::size_t i = 0; i < a.size(); ++i)
    EXPECT_TRUE(at::equal(a[i], b[i])) << what << ": tensor " << i << " differs by "
                                       << (a[i] - b[i]).abs().max().item<double>();
}

}  // namespace fsdp::testing
