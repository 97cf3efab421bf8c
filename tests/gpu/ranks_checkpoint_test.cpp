// Checkpoints of several GPU ranks: a run that goes on from one equals a run that never stopped, bit for bit.
#include <filesystem>
#include <memory>

#include "fsdp/checkpoint/checkpoint.h"
#include "tests/gpu/ranks.h"

namespace fsdp::testing {
namespace {

struct Trained {
  Trained(const UnitOptions& unit)
      : run(world(), DeviceMesh(world(), {{"dp", size()}}), {}, unit, 4, 64),
        optimizer(*run.context, {.learning_rate = 0.01}),
        checkpoint(*run.context, &optimizer) {}
  void step(int index) {
    run.loss(static_cast<std::uint64_t>(index)).backward();
    optimizer.step(clip_grad_norm_(*run.context, 1.0));
    optimizer.zero_grad();
  }
  void steps(int first, int end) {
    for (int index = first; index < end; ++index) step(index);
  }
  GpuRun run;
  AdamW optimizer;
  Checkpoint checkpoint;
};

// One folder for all ranks, whose name they agree on.
class Folder {
 public:
  Folder() {
    const char* job = std::getenv("MASTER_PORT");
    path_ =
        std::filesystem::temp_directory_path() / (std::string("fsdp-gpu-checkpoint-") + (job == nullptr ? "" : job));
  }
  ~Folder() {
    if (rank() == 0) std::filesystem::remove_all(path_);
  }
  [[nodiscard]] std::filesystem::path in(const std::string& name) const { return path_ / name; }

 private:
  std::filesystem::path path_;
};

TEST(GpuRanks, CheckpointsContinueBitForBit) {
  const Folder folder;
  UnitOptions low;  // fp32 main weights, a low-precision copy that the optimizer writes
  low.mixed_precision.param_dtype = at::kBFloat16;
  low.mixed_precision.reduce_dtype = at::kFloat;
  for (const UnitOptions& unit : {UnitOptions{}, low, UnitOptions{.placements = zero1("dp")}}) {
    std::vector<at::Tensor> expected, at_three;
    {
      Trained trained(unit);
      trained.steps(0, 3);
      trained.checkpoint.begin_save(folder.in("three"));
      at_three = trained.run.weights();
      trained.steps(3, 6);  // while files are written
      expected = trained.run.weights();
      trained.checkpoint.finish_save();
    }
    Trained trained(unit);
    trained.steps(0, 1);
    static_cast<void>(trained.checkpoint.load(folder.in("three")));
    expect_equal(trained.run.weights(), at_three, "loaded");
    trained.steps(3, 6);
    expect_equal(trained.run.weights(), expected, "continued");
    // Again, now with an optimizer and weights that have moved on.
    static_cast<void>(trained.checkpoint.load(folder.in("three")));
    trained.steps(3, 6);
    expect_equal(trained.run.weights(), expected, "continued again");
  }
}

}  // namespace
}  // namespace fsdp::testing
