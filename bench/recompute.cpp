// What recomputation saves and costs: a sharded transformer of 12 blocks on one rank, with and without it.
//
// Memory is what ATen's allocator handed out at most during a step, beyond what rests. In theory one more forward makes
// a step 4/3 as long. Plain and recomputed steps take turns; medians over the rounds.
//   bench_recompute [rounds]
#include <ATen/Parallel.h>
#include <ATen/ops/randint.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <vector>

#include "bench/json_line.h"
#include "fsdp/fsdp.h"
#include "models/transformer.h"

namespace {

class PeakReporter final : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(void*, std::int64_t size, std::size_t, std::size_t, c10::Device) override {
    peak = std::max(peak, live += size);
  }
  [[nodiscard]] bool memoryProfilingEnabled() const override { return true; }
  std::int64_t live = 0, peak = 0;
};

struct Training {
  explicit Training(const fsdp::DeviceMesh& mesh, bool recompute)
      : context(fsdp::FsdpContext::create(mesh)), model(config(recompute)) {
    fsdp::models::shard_transformer(*context, model, {});
  }
  static fsdp::models::TransformerConfig config(bool recompute) {
    fsdp::models::TransformerConfig config;
    config.vocabulary = 256;
    config.layers = 12;
    config.width = 256;
    config.heads = config.kv_heads = 4;
    config.ffn_width = 704;
    config.recompute = recompute;
    return config;
  }
  void step(const at::Tensor& tokens) {
    fsdp::call(model, &fsdp::models::TransformerImpl::loss, tokens, tokens).backward();
    for (auto& leaf : context->parameters()) leaf.mutable_grad().reset();
  }
  std::shared_ptr<fsdp::FsdpContext> context;
  fsdp::models::Transformer model;
};

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 7;
  at::set_num_threads(1);
  const fsdp::DeviceMesh mesh(fsdp::World::single(), {{"dp", 1}});
  Training plain(mesh, false), recomputed(mesh, true);
  const auto tokens = at::randint(256, {4, 256}, at::kLong);
  std::vector<double> seconds[2];
  std::int64_t peaks[2] = {0, 0};
  for (int round = 0; round <= rounds; ++round) {
    for (int k = 0; k < 2; ++k) {
      auto reporter = std::make_shared<PeakReporter>();
      c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, reporter);
      const auto start = std::chrono::steady_clock::now();
      (k == 0 ? plain : recomputed).step(tokens);
      const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
      peaks[k] = reporter->peak;
      if (round > 0) seconds[k].push_back(time.count());
    }
  }
  constexpr double kMiB = 1024.0 * 1024;
  fsdp::bench::print({"recompute", "step_seconds", median(seconds[1]), "s", median(seconds[0]), 1.36});
  fsdp::bench::print({"recompute", "step_memory", static_cast<double>(peaks[1]) / kMiB, "MiB",
                      static_cast<double>(peaks[0]) / kMiB, 0.35});
  return 0;
}
