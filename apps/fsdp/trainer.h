// One rank's part of a training run: model, context, optimizer, and the loop over the steps.
//
// All ranks make a Trainer and call run(); only rank 0 reports. They stop at the same point: whether to go on is
// decided from sums over all ranks. Batches are read ahead on a thread of their own.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "apps/fsdp/agreement.h"
#include "apps/fsdp/batch_tensors.h"
#include "apps/fsdp/checkpoints.h"
#include "apps/fsdp/profiler.h"
#include "apps/fsdp/progress.h"
#include "apps/fsdp/run_log.h"
#include "apps/fsdp/train_config.h"
#include "apps/fsdp/trained_model.h"
#include "fsdp/data/batch_prefetcher.h"
#include "fsdp/data/token_dataset.h"
#include "fsdp/module/context.h"
#include "fsdp/optim/optimizer.h"

namespace fsdp::app {

// Shared by the ranks; what it refers to outlives all trainers.
struct TrainShared {
  const TrainConfig& config;
  const data::TokenDataset& data;
  Progress& progress;  // rank 0 only
  RunLog& log;         // rank 0 only
  std::filesystem::path profile;
};

class Trainer {
 public:
  Trainer(World world, const TrainShared& shared);

  RunResult run();

 private:
  struct Stop {
    bool interrupted = false;
    bool out_of_time = false;
    bool checkpoint_written = false;  // on all ranks, when one is under way
  };
  // Fills `result`; the answer is equal on all ranks.
  Stop step(std::int64_t index, StepResult& result);
  // The batches of this rank, one a microbatch.
  [[nodiscard]] data::BatchPrefetcher::Batches make_batches(std::int64_t step) const;
  // The number by which a microbatch's loss over its targets adds up to the mean over the step's.
  [[nodiscard]] double target_count(std::int64_t step) const;
  // Enqueues a step on the batches; (sum of the microbatches' losses, gradient norm) in fp64, on the device.
  [[nodiscard]] at::Tensor compute(const std::vector<BatchTensors>& batches);
  // The batches on the device; with run.capture always in the same tensors.
  [[nodiscard]] const std::vector<BatchTensors>& load(data::BatchPrefetcher::Batches batches);
  [[nodiscard]] bool evaluation_is_due(std::int64_t steps_done) const;
  void evaluate(std::int64_t steps_done);
  void finish_checkpoint();
  void report(const StepResult& result);
  void sample();
  void print(const std::string& text);
  [[nodiscard]] bool leads() const { return world_.rank() == Rank(0); }

  World world_;
  const TrainShared shared_;
  const TrainConfig& config_;
  Agreement agreement_;
  std::unique_ptr<TrainedModel> model_;
  std::shared_ptr<FsdpContext> context_;
  std::unique_ptr<ShardedOptimizer> optimizer_;
  Checkpoints checkpoints_;
  std::int64_t first_step_ = 0;
  std::optional<Profiler> profiler_;
  std::unique_ptr<data::BatchPrefetcher> batches_;
  std::vector<BatchTensors> inputs_;  // [microbatch]
  at::Tensor loss_scale_;             // of a microbatch's sum, with data.mask_document_starts; a scalar on the device
  std::optional<FsdpContext::CapturedStep> captured_;
  RunResult result_;
};

}  // namespace fsdp::app
