// Runs the microbatches of a training step over a caller-driven FSDP model, in the order of a schedule.
//
//   pipeline::StepDriver driver(context, model, {.schedule = pipeline::Schedule::one_f_one_b});
//   auto losses = driver.run(microbatches);          // gradients are reduced; the current stream waits for them
//   optimizer.step(fsdp::clip_grad_norm_(*context, 1.0));  optimizer.zero_grad();
//
// Units have UnitOptions::register_hooks = false: the driver gathers them along the schedule, drops them after their
// layer's last forward node, and reduces each when its gradients, delayed ones included, are complete. Host thread of
// the rank only; all ranks run the same schedule.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/module/context.h"
#include "fsdp/pipeline/chunk_plan.h"
#include "fsdp/pipeline/gather_cursor.h"
#include "fsdp/pipeline/stage_channels.h"

namespace fsdp::pipeline {

enum class Schedule : std::uint8_t {
  sequential,   // forward and backward of each microbatch in turn
  one_f_one_b,  // a forward between the pieces of the backward before it
};

struct StepOptions {
  Schedule schedule = Schedule::one_f_one_b;
  bool delay_weights = true;   // ChunkShape
  bool release_early = false;  // ChunkShape
  int gather_ahead = 1;        // units gathered before their use; 0: each is gathered at its use
};

class StepDriver {
 public:
  // Throws UsageError naming a unit whose hooks would interfere, and when another driver of the context lives.
  StepDriver(std::shared_ptr<FsdpContext> context, std::shared_ptr<StagedModel> model, const StepOptions& options);
  // A pipeline: `chunks` are this rank's parts of the model, in order, all their units in one context, sharded over the
  // other axes of the mesh. Interleaved 1F1B where a stage has several; every stage has as many.
  StepDriver(std::shared_ptr<FsdpContext> context, std::vector<std::shared_ptr<StagedModel>> chunks,
             std::shared_ptr<StageChannels> channels, const StepOptions& options);
  ~StepDriver();
  StepDriver(const StepDriver&) = delete;
  StepDriver& operator=(const StepDriver&) = delete;

  // One step: every microbatch's loss (a scalar without graph), in order; undefined except on a pipeline's last stage.
  // All stages are given the same microbatches; their number and sizes are compared. Each loss's gradient is 1 /
  // microbatches. Gradients are complete and ordered before what the current stream does next (with
  // ContextOptions::overlap_optimizer: before the library's optimizers). An outer microbatch scope holds: under no_sync
  // the step reduces no further than its microbatches do.
  std::vector<at::Tensor> run(std::vector<Microbatch> microbatches);

  // After an exception, with all ranks alive: back to a clean sharded state; the gradients of the step are dropped. All
  // ranks call it instead of FsdpContext::reset. Blocks the host.
  void reset();

  // The loss of one microbatch, without gradients. Collective all the same; undefined except on the last stage.
  [[nodiscard]] at::Tensor evaluate(const Microbatch& microbatch);
  // The results of node post for these inputs; none except on the last stage.
  [[nodiscard]] Tensors predict(const Tensors& inputs);

  // The nodes of the last step as they were issued.
  [[nodiscard]] const std::vector<NodeCall>& issued() const { return issued_; }
  [[nodiscard]] const StepOptions& options() const { return options_; }

 private:
  [[nodiscard]] std::vector<FsdpModule*> uses_of(const NodeCall& call) const;
  void start_cursor(const std::vector<NodeCall>& calls);
  void release_after_forward(const NodeCall& call);
  Tensors forward_only(const Microbatch& microbatch, bool with_loss);
  [[nodiscard]] StagedModel& chunk_of(const NodeCall& call) const {
    return *chunks_[static_cast<std::size_t>(call.chunk)];
  }
  [[nodiscard]] std::vector<std::vector<NodeCall>> steps(int microbatches) const;
  // Messages between stages carry no names: that all stages make the same call is compared before it.
  void check_stages_agree(const char* call, const std::vector<const Microbatch*>& microbatches) const;
  void expect_arrivals(const std::vector<NodeCall>& step, const std::vector<Microbatch>& microbatches);

  const std::shared_ptr<FsdpContext> context_;
  const std::vector<std::shared_ptr<StagedModel>> chunks_;
  const std::shared_ptr<StageChannels> channels_;  // null: no pipeline
  const StepOptions options_;
  std::vector<NodeRanges> ranges_;  // [chunk]
  Lanes lanes_;
  // Shared with the units' hooks, which outlive the driver.
  struct Hooks {
    bool alive = true;
    GatherCursor cursor;
  };
  const std::shared_ptr<Hooks> hooks_;
  std::vector<NodeCall> issued_;
};

}  // namespace fsdp::pipeline
