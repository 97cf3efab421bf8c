// Host time that sharding adds to a unit: 64 units of 16 small parameters, world 1, against the same model bare.
//
// Bare and sharded take turns, round by round; medians over the rounds. Everything a unit does is in it: gather (a copy
// here), hooks, own accumulators, packing, reduction, release. `linear` is the same with fsdp::linear in the model.
//   bench_host_overhead [rounds]
#include <ATen/Parallel.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/relu.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <vector>

#include "bench/json_line.h"
#include "fsdp/fsdp.h"

namespace {

constexpr int kUnits = 64;
constexpr std::int64_t kWidth = 16;

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(bool own_linear) : own_linear_(own_linear) {
    const std::int64_t d = kWidth;
    const std::vector<std::vector<std::int64_t>> shapes{{d},    {d}, {d, d}, {d}, {d, d},     {d},     {d, d},     {d},
                                                        {d, d}, {d}, {d},    {d}, {4 * d, d}, {4 * d}, {d, 4 * d}, {d}};
    for (std::size_t i = 0; i < shapes.size(); ++i) {
      p.push_back(register_parameter("p" + std::to_string(i),
                                     shapes[i].size() == 1 ? at::ones(shapes[i]) : at::randn(shapes[i]) * 0.1));
    }
  }
  at::Tensor linear(const at::Tensor& x, int i) const {
    return own_linear_ ? fsdp::linear(x, p[i], p[i + 1]) : at::linear(x, p[i], p[i + 1]);
  }
  at::Tensor forward(at::Tensor x) {
    auto y = at::layer_norm(x, {kWidth}, p[0], p[1]);
    y = linear(y, 2) + linear(y, 4) + linear(y, 6);
    const auto z = x + linear(y, 8);
    return z + linear(at::relu(linear(at::layer_norm(z, {kWidth}, p[10], p[11]), 12)), 14);
  }
  std::vector<at::Tensor> p;
  bool own_linear_;
};
FSDP_MODULE(Block);

struct RootImpl : torch::nn::Module {
  explicit RootImpl(bool own_linear) {
    for (int i = 0; i < kUnits; ++i) {
      blocks.push_back(Block(own_linear));
      register_module("block" + std::to_string(i), blocks.back());
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& block : blocks) x = block->forward(x);
    return x;
  }
  std::vector<Block> blocks;
};
FSDP_MODULE(Root);

struct Model {
  explicit Model(bool own_linear) : root(own_linear) {}
  Root root;
  std::shared_ptr<fsdp::FsdpContext> context;
};

double microseconds(std::chrono::steady_clock::duration d) {
  return std::chrono::duration<double, std::micro>(d).count();
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

struct Times {
  std::vector<double> forward, backward;  // us a unit, [round]
};

void run_round(Model& model, Times& times) {
  at::Tensor x = at::ones({4, kWidth}).set_requires_grad(true);
  const auto start = std::chrono::steady_clock::now();
  const at::Tensor y = model.root->forward(x);
  const auto middle = std::chrono::steady_clock::now();
  y.backward(at::ones_like(y));
  const auto end = std::chrono::steady_clock::now();
  times.forward.push_back(microseconds(middle - start) / kUnits);
  times.backward.push_back(microseconds(end - middle) / kUnits);
  if (model.context) {
    for (auto& leaf : model.context->parameters()) leaf.mutable_grad().reset();
  } else {
    for (auto& block : model.root->blocks) {
      for (auto& p : block->p) p.mutable_grad().reset();
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 200;
  at::set_num_threads(1);
  fsdp::World world = fsdp::World::single();
  fsdp::DeviceMesh mesh(world, {{"dp", 1}});
  Model bare(false), sharded(false), with_linear(true);
  for (Model* model : {&sharded, &with_linear}) {
    model->context = fsdp::FsdpContext::create(mesh);
    for (auto& block : model->root->blocks) model->context->fully_shard(block, {});
    model->context->fully_shard(model->root, {});
  }
  Times times[3];
  for (int round = 0; round < rounds + 10; ++round) {
    Model* models[3] = {&bare, &sharded, &with_linear};
    for (int k = 0; k < 3; ++k) {
      Times warm_up;
      run_round(*models[k], round < 10 ? warm_up : times[k]);
    }
  }
  const char* names[3] = {"", "", "linear_"};
  for (int k = 1; k < 3; ++k) {
    const std::string name = names[k];
    const double forward = median(times[k].forward), backward = median(times[k].backward);
    const double bare_forward = median(times[0].forward), bare_backward = median(times[0].backward);
    fsdp::bench::print({"host_overhead", name + "forward_us_per_unit", forward, "us", bare_forward, 1.25});
    fsdp::bench::print({"host_overhead", name + "backward_us_per_unit", backward, "us", bare_backward, 1.25});
    fsdp::bench::print({"host_overhead", name + "forward_us_over_bare", forward - bare_forward, "us", {}, 25});
    fsdp::bench::print({"host_overhead", name + "backward_us_over_bare", backward - bare_backward, "us", {}, 60});
  }
  return 0;
}
