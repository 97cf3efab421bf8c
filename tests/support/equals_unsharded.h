// Compares a sharded run with what the same ranks would compute without sharding: the mean of their gradients.
#pragma once

#include <ATen/core/grad_mode.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros_like.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <string>

#include "tests/support/train.h"

namespace fsdp::testing {

// Gives every parameter values that depend on `seed` and its place only.
template <typename Holder>
Holder filled(Holder model, std::uint64_t seed = 1) {
  at::NoGradGuard no_grad;
  for (auto& parameter : model->parameters()) parameter.copy_(random(parameter.sizes(), ++seed) * 0.4);
  return model;
}

template <typename Holder>
struct UnshardedCase {
  std::function<Holder()> make;                         // equal on all ranks
  std::function<void(FsdpContext&, Holder&)> shard;     // makes the units
  std::function<void(Holder&, int rank)> run_backward;  // forward and backward of one rank
  ContextOptions context = {};
  double tolerance = 1e-5;
};

// Names of the parameters without gradient on every rank; the others' mean over ranks.
using Gradients = std::map<std::string, at::Tensor>;

template <typename Holder>
Gradients mean_gradients(const UnshardedCase<Holder>& c, int ranks) {
  Gradients sums;
  for (int rank = 0; rank < ranks; ++rank) {
    Holder model = c.make();
    c.run_backward(model, rank);
    for (auto& item : model->named_parameters()) {
      at::Tensor& sum = sums[item.key()];
      if (!item.value().grad().defined()) continue;
      const at::Tensor gradient = item.value().grad().to(at::kDouble) / ranks;
      sum = sum.defined() ? sum + gradient : gradient;
    }
  }
  return sums;
}

// Every parameter's reduced gradient, under each of its names, and whether there is one at all.
inline void expect_gradients(FsdpContext& context, const Gradients& expected, double tolerance,
                             const std::string& what) {
  for (const auto& [name, gradient] : expected) {
    const at::Tensor got = context.full_gradient(name).to(at::kDouble);
    const at::Tensor wanted = gradient.defined() ? gradient : at::zeros_like(got);
    EXPECT_TRUE(at::allclose(got, wanted, tolerance, tolerance))
        << what << ": " << name << " differs by " << (got - wanted).abs().max().item<double>();
  }
  for (const auto& [name, leaf] : context.named_parameters()) {
    const auto found = expected.find(name);
    ASSERT_NE(found, expected.end()) << what << ": no parameter " << name << " in the unsharded model";
    if (leaf.numel() > 0) {
      EXPECT_EQ(leaf.grad().defined(), found->second.defined()) << what << ": gradient of " << name;
    }
  }
}

// One backward on 1, 2 and 3 ranks; nothing stays gathered.
template <typename Holder>
void expect_equals_unsharded(const UnshardedCase<Holder>& c, const std::vector<int>& worlds = {1, 2, 3}) {
  for (int ranks : worlds) {
    const Gradients expected = mean_gradients(c, ranks);
    run_ranks(ranks,
              [&](World world) {
                auto context = FsdpContext::create(DeviceMesh(world, {{"dp", ranks}}), c.context);
                Holder model = c.make();
                c.shard(*context, model);
                c.run_backward(model, static_cast<int>(world.rank().value()));
                expect_gradients(*context, expected, c.tolerance, fmt::format("{} ranks", ranks));
                EXPECT_EQ(context->memory_report().gathered, Bytes(0));
              },
              {.deadline = std::chrono::seconds(30)});
  }
}

}  // namespace fsdp::testing
