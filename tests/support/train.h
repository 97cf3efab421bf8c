// Short ways to run a toy model on ranks.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/randn.h>
#include <torch/utils.h>

#include <functional>
#include <mutex>

#include "fsdp/fsdp.h"
#include "tests/support/toy_model.h"

namespace fsdp::testing {

inline constexpr std::int64_t kToyInputs = 5;

inline at::Tensor random(at::IntArrayRef sizes, std::uint64_t seed) {
  return at::randn(sizes, at::detail::createCPUGenerator(seed));
}

inline ToyModel make_toy_model(std::int64_t width = 7, int depth = 3) {
  static std::mutex mutex;  // the default generator is the process's
  std::lock_guard lock(mutex);
  torch::manual_seed(1);
  return ToyModel(kToyInputs, width, 19, depth);
}

// The loss of one microbatch; equal seeds give equal data.
inline at::Tensor toy_loss(ToyModel& model, std::uint64_t seed) {
  return fsdp::call(model, &ToyModelImpl::loss, random({4, kToyInputs}, seed), random({4, 3}, seed + 1));
}

// A rank of a run: mesh of one axis, context, sharded model.
struct ToyRank {
  ToyRank(World world, const ContextOptions& options = {}, const UnitOptions& unit = {})
      : rank(static_cast<int>(world.rank().value())),
        context(FsdpContext::create(DeviceMesh(world, {{"dp", world.size()}}), options)),
        model(make_toy_model()) {
    shard_toy_model(*context, model, unit);
  }
  int rank;
  std::shared_ptr<FsdpContext> context;
  ToyModel model;
};

inline void run_toy(int ranks, const std::function<void(ToyRank&)>& body, const ContextOptions& options = {},
                    const UnitOptions& unit = {}) {
  run_ranks(ranks,
            [&](World world) {
              ToyRank rank(world, options, unit);
              body(rank);
            },
            {.deadline = std::chrono::seconds(30)});
}

}  // namespace fsdp::testing
