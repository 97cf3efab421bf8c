// What the library's own optimizers share: per-parameter options and fused updates over flat shards.
//
// On a device AdamW is one kernel for many parameters of any dtypes, which also writes the low-precision weights.
// Elsewhere neighbouring parameters of a group with equal options are updated as one run of the flat shard, so the
// number of kernels depends on the number of options and not on the number of parameters. State has the dtype of the
// main weight.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/module/context.h"

namespace fsdp {

// Of one parameter. Unset entries take the optimizer's value.
struct ParameterOptions {
  double learning_rate_scale = 1.0;  // multiplies the optimizer's learning rate
  std::optional<double> weight_decay = {};
  bool operator==(const ParameterOptions&) const = default;
};

// Called once per trainable parameter with its name and whole shape: at construction, or when it is unfrozen.
using ParameterOptionsFunction = std::function<ParameterOptions(const std::string& name, at::IntArrayRef whole_sizes)>;

// Consecutive elements of one group's shard that are always updated alike.
struct ShardRun {
  FsdpParameterGroup* group = nullptr;
  std::vector<int> parameters;  // indices in the group, each with at least one element here
  ElementRange range;           // packed coordinates, padding between the parameters included
  ParameterOptions options;
  at::Tensor weight;  // view of the main weight
  std::vector<at::Tensor> state;
  at::Tensor step;  // fp32 scalar: updates this run has seen
};

// A run whose gradients exist, with what the library's own kernel needs of it.
struct DeviceRun {
  ShardRun* run = nullptr;
  void* gradient = nullptr;       // of the run's range
  void* low_precision = nullptr;  // where the new weights go rounded to the compute dtype; null: nowhere
};

class ShardedOptimizer {
 public:
  virtual ~ShardedOptimizer() = default;
  ShardedOptimizer(const ShardedOptimizer&) = delete;
  ShardedOptimizer& operator=(const ShardedOptimizer&) = delete;

  // Updates every parameter that has a gradient. With a norm (of clip_grad_norm_) that is not finite, nothing is
  // updated on any rank and the step is counted as skipped. With a `max_norm` gradients count as clipped to it: as
  // clip_grad_norm_ before, with the same bits where gradients are fp32, on a GPU without a pass of its own (what
  // `.grad` holds afterwards is unspecified). Enqueued on the current stream; no host wait on a GPU.
  void step(const std::optional<at::Tensor>& gradient_norm = std::nullopt,
            const std::optional<double>& max_norm = std::nullopt);

  // Gradients become undefined and their memory is freed, or are zeroed in place.
  void zero_grad(bool set_to_none = true);

  [[nodiscard]] double learning_rate() const { return learning_rate_; }
  void set_learning_rate(double learning_rate);  // throws UsageError unless it is finite and not negative

  // Steps skipped for a gradient norm that was not finite. Waits for the device.
  [[nodiscard]] std::int64_t skipped_steps() const;
  [[nodiscard]] Bytes state_bytes() const;

  // For checkpoints: what is kept of a parameter's elements on this rank. Views, until the next step; to write to.
  struct ParameterState {
    FsdpParameterGroup* group = nullptr;
    int parameter = 0;                                        // index in the group
    std::vector<std::pair<std::string, at::Tensor>> tensors;  // by name, as many elements as this rank has
    at::Tensor step;                                          // fp32 scalar: updates; neighbours may share it
  };
  [[nodiscard]] std::vector<ParameterState> parameter_states();
  [[nodiscard]] const std::vector<std::string>& state_names() const { return state_names_; }
  void set_steps(const std::vector<float>& steps);                       // [as in parameter_states]
  [[nodiscard]] at::Tensor skipped_counter() const { return skipped_; }  // fp32 scalar

 protected:
  // A run has a zero-filled tensor for each of `state_names`. Groups that are unfrozen later get theirs at the next
  // step. `own_kernel`: update_on_device is used where there is a device with kernels.
  ShardedOptimizer(FsdpContext& context, double learning_rate, std::vector<std::string> state_names,
                   ParameterOptionsFunction options, bool own_kernel = false);

  // Updates runs that share their options. `skip`: fp32 scalar, 1 when nothing may change.
  virtual void update(const std::vector<ShardRun*>& runs, const std::vector<at::Tensor>& gradients,
                      const ParameterOptions& options, const std::optional<at::Tensor>& skip) = 0;

  // Optimizers with a kernel of their own get all runs at once instead, each one parameter's.
  virtual void update_on_device(const std::vector<DeviceRun>&, const at::Tensor& /*learning_rate*/,
                                const std::optional<at::Tensor>& /*skip*/,
                                const std::optional<at::Tensor>& /*gradient_scale: fp32 scalar*/) {}
  [[nodiscard]] Kernels* kernels() const { return kernels_; }

 private:
  void step_by_operators(std::span<ShardRun> runs, const std::optional<at::Tensor>& skip);
  void step_on_device(std::span<ShardRun> runs, const std::optional<at::Tensor>& skip,
                      const std::optional<at::Tensor>& gradient_scale);
  void add_trainable_groups(FsdpContext& context);
  void split(std::size_t run);  // into one run per parameter, when their gradients stop coming together

  std::shared_ptr<FsdpContext> context() const;  // throws UsageError when it is gone

  std::weak_ptr<FsdpContext> context_;
  double learning_rate_;
  const std::vector<std::string> state_names_;
  const ParameterOptionsFunction options_;
  std::set<FsdpParameterGroup*> groups_;  // with runs
  std::vector<ShardRun> runs_;
  Kernels* kernels_ = nullptr;  // of a device, where update_on_device is used
  at::Tensor skipped_;          // fp32 scalar
  at::Tensor device_rate_;      // fp32 scalar on a device: a captured step reads it
};

}  // namespace fsdp
