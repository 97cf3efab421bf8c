#include "fsdp/optim/optimizer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/fill.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "fsdp/base/check.h"
#include "fsdp/optim/clip_grad_norm.h"

namespace fsdp {

ShardedOptimizer::ShardedOptimizer(FsdpContext& context, double learning_rate, std::vector<std::string> state_names,
                                   ParameterOptionsFunction options, bool own_kernel)
    : context_(context.weak_from_this()), state_names_(std::move(state_names)), options_(std::move(options)) {
  context.finalize();
  if (own_kernel) kernels_ = context.mesh().runtime()->kernels();
  for (const FsdpParameterGroup* group : context.groups()) {
    if (group->dtypes().main == c10::kDouble || group->dtypes().gradient == c10::kDouble) kernels_ = nullptr;
  }
  skipped_ = at::zeros({}, at::TensorOptions().dtype(at::kFloat).device(context.mesh().runtime()->device()));
  if (kernels_ != nullptr) device_rate_ = at::zeros_like(skipped_);
  set_learning_rate(learning_rate);
  add_trainable_groups(context);
}

void ShardedOptimizer::add_trainable_groups(FsdpContext& context) {
  const std::size_t known = runs_.size();
  for (FsdpParameterGroup* group : context.groups()) {
    if (!group->trainable() || !groups_.insert(group).second) continue;
    const DBuffer& weight = group->main_weight();
    for (std::size_t i = 0; i < group->parameters().size(); ++i) {
      const auto& p = group->parameters()[i];
      const ParameterOptions chosen = options_ ? options_(p.name, p.sizes) : ParameterOptions{};
      const ElementRange piece = weight.piece(static_cast<int>(i));
      if (piece.empty()) continue;
      if (runs_.size() > known && kernels_ == nullptr && runs_.back().group == group &&
          runs_.back().options == chosen) {
        runs_.back().range.end = piece.end;
      } else {
        runs_.push_back({group, {}, piece, chosen, {}, {}, {}});
      }
      runs_.back().parameters.push_back(static_cast<int>(i));
    }
  }
  at::NoGradGuard no_grad;
  for (std::size_t i = known; i < runs_.size(); ++i) {
    ShardRun& run = runs_[i];
    run.weight = run.group->main_weight().slice(run.range);
    for (std::size_t k = 0; k < state_names_.size(); ++k) run.state.push_back(at::zeros_like(run.weight));
    run.step = at::zeros_like(skipped_);
  }
}

void ShardedOptimizer::split(std::size_t index) {
  const ShardRun whole = std::move(runs_[index]);
  std::vector<ShardRun> parts;
  for (int parameter : whole.parameters) {
    const ElementRange piece = whole.group->main_weight().piece(parameter);
    ShardRun part{whole.group, {parameter},       piece, whole.options, whole.group->main_weight().slice(piece),
                  {},          whole.step.clone()};
    for (const auto& state : whole.state)
      part.state.push_back(state.narrow(0, piece.begin - whole.range.begin, piece.length()));
    parts.push_back(std::move(part));
  }
  runs_.erase(runs_.begin() + static_cast<std::ptrdiff_t>(index));
  runs_.insert(runs_.begin() + static_cast<std::ptrdiff_t>(index), std::make_move_iterator(parts.begin()),
               std::make_move_iterator(parts.end()));
}

std::shared_ptr<FsdpContext> ShardedOptimizer::context() const {
  auto context = context_.lock();
  FSDP_CHECK(context != nullptr, UsageError,
             "the FsdpContext of this optimizer was destroyed: keep the context as long as its optimizers");
  return context;
}

void ShardedOptimizer::set_learning_rate(double learning_rate) {
  FSDP_CHECK(std::isfinite(learning_rate) && learning_rate >= 0, UsageError,
             "the learning rate is {}, expected a finite number of 0 or more", learning_rate);
  learning_rate_ = learning_rate;
  if (device_rate_.defined()) device_rate_.fill_(learning_rate);
}

void ShardedOptimizer::step(const std::optional<at::Tensor>& gradient_norm, const std::optional<double>& max_norm) {
  const auto alive = context();
  alive->check_gradients_reduced("optimizer step");
  alive->optimizer_stepped();
  add_trainable_groups(*alive);
  for (FsdpParameterGroup* group : alive->groups()) {  // also those whose shard here is empty: ranks must agree
    if (group->trainable() && group->any_gradient_defined()) group->note_write();
  }
  at::NoGradGuard no_grad;
  std::optional<at::Tensor> skip;
  if (gradient_norm) {
    skip = at::isfinite(*gradient_norm).logical_not().to(at::kFloat);
    skipped_.add_(*skip);
  }
  FSDP_CHECK(kernels_ != nullptr || !alive->mesh().runtime()->capturing(), UsageError,
             "this optimizer's step would keep the learning rate of now in a captured step; on a GPU fsdp::AdamW over "
             "gradients of at most fp32 can be captured");
  std::optional<at::Tensor> scale;
  if (max_norm) {
    FSDP_CHECK(gradient_norm.has_value(), UsageError, "optimizer step: max_norm needs the gradients' norm (grad_norm)");
    scale = clip_scale(*gradient_norm, *max_norm);
    if (kernels_ == nullptr) {
      alive->wait_for_gradients();
      scale_gradients(*alive, *scale);
    }
  }
  for (std::size_t i = 0; i < runs_.size() && kernels_ == nullptr; ++i) {
    const auto& parameters = runs_[i].parameters;
    const auto defined = std::count_if(parameters.begin(), parameters.end(),
                                       [&](int p) { return runs_[i].group->parameters()[p].leaf.grad().defined(); });
    if (defined != 0 && defined != static_cast<std::ptrdiff_t>(parameters.size())) split(i);
  }
  const auto step_some = [&](std::span<ShardRun> runs) {
    if (runs.empty()) return;
    if (kernels_ != nullptr)
      step_on_device(runs, skip, scale);
    else
      step_by_operators(runs, skip);
  };
  // Units whose gradients are there first, then the others as they come. Each run belongs to one unit, and the runs of
  // a unit lie together, but for those that were unfrozen later.
  const auto waiting = alive->units_being_reduced();
  const auto stretch = [&](std::size_t begin, const auto& belongs) {
    std::size_t end = begin;
    while (end < runs_.size() && belongs(&runs_[end].group->unit())) ++end;
    return std::span(runs_).subspan(begin, end - begin);
  };
  const auto step_those = [&](const auto& belongs) {
    for (std::size_t i = 0; i < runs_.size();) {
      const auto runs = stretch(i, belongs);
      step_some(runs);
      i += std::max<std::size_t>(1, runs.size());
    }
  };
  step_those([&](FsdpModule* unit) { return std::find(waiting.begin(), waiting.end(), unit) == waiting.end(); });
  for (FsdpModule* unit : waiting) {
    alive->wait_for_gradients(*unit);
    step_those([&](FsdpModule* of) { return of == unit; });
  }
  if (kernels_ == nullptr) return;
  for (FsdpParameterGroup* updated : groups_) {
    const auto& parameters = updated->parameters();
    // A skipped update leaves weights and copies as they are; a parameter without gradient was not copied.
    if (std::all_of(parameters.begin(), parameters.end(), [](const auto& p) { return p.leaf.grad().defined(); }))
      updated->note_low_precision_copy();
  }
}

void ShardedOptimizer::step_by_operators(std::span<ShardRun> some, const std::optional<at::Tensor>& skip) {
  std::vector<bool> done(some.size());
  for (std::size_t i = 0; i < some.size(); ++i) {
    if (done[i]) continue;
    std::vector<ShardRun*> runs;
    std::vector<at::Tensor> gradients;
    for (std::size_t k = i; k < some.size(); ++k) {
      ShardRun& run = some[k];
      if (done[k] || run.options != some[i].options || run.weight.scalar_type() != some[i].weight.scalar_type())
        continue;
      done[k] = true;
      const at::Tensor gradient = run.group->gradient_slice(run.range);
      if (!run.group->parameters()[run.parameters.front()].leaf.grad().defined()) continue;  // no rank used it
      runs.push_back(&run);
      gradients.push_back(gradient.to(run.weight.scalar_type()));
    }
    if (!runs.empty()) update(runs, gradients, some[i].options, skip);
  }
}

void ShardedOptimizer::step_on_device(std::span<ShardRun> some, const std::optional<at::Tensor>& skip,
                                      const std::optional<at::Tensor>& gradient_scale) {
  std::vector<DeviceRun> runs;
  FsdpParameterGroup* group = nullptr;
  std::byte* gradients = nullptr;  // of the group's whole shard
  for (ShardRun& run : some) {
    const ElementRange shard = run.group->main_weight().range();
    if (run.group != group) {
      group = run.group;
      const at::Tensor whole = group->gradient_slice(shard);
      gradients = whole.defined() ? static_cast<std::byte*>(whole.mutable_data_ptr()) : nullptr;
    }
    if (gradients == nullptr || !group->parameters()[run.parameters.front()].leaf.grad().defined()) continue;
    const auto width = static_cast<std::int64_t>(c10::elementSize(group->dtypes().gradient));
    runs.push_back({&run, gradients + (run.range.begin - shard.begin) * width, group->low_precision_copy(run.range)});
  }
  if (!runs.empty()) update_on_device(runs, device_rate_, skip, gradient_scale);
}

void ShardedOptimizer::zero_grad(bool set_to_none) {
  at::NoGradGuard no_grad;
  const auto alive = context();
  alive->wait_for_gradients();
  alive->drop_accumulated_gradients();
  for (FsdpParameterGroup* group : alive->groups()) {
    if (group->trainable()) group->zero_gradients(set_to_none);
  }
}

std::int64_t ShardedOptimizer::skipped_steps() const { return static_cast<std::int64_t>(skipped_.item<float>()); }

std::vector<ShardedOptimizer::ParameterState> ShardedOptimizer::parameter_states() {
  add_trainable_groups(*context());
  std::vector<ParameterState> states;
  for (const ShardRun& run : runs_) {
    for (int parameter : run.parameters) {
      const ElementRange piece = run.group->main_weight().piece(parameter);
      ParameterState state{run.group, parameter, {}, run.step};
      for (std::size_t k = 0; k < state_names_.size(); ++k)
        state.tensors.emplace_back(state_names_[k],
                                   run.state[k].narrow(0, piece.begin - run.range.begin, piece.length()));
      states.push_back(std::move(state));
    }
  }
  return states;
}

void ShardedOptimizer::set_steps(const std::vector<float>& steps) {
  at::NoGradGuard no_grad;
  auto next = steps.begin();
  for (std::size_t i = 0; i < runs_.size();) {
    const auto count = static_cast<std::ptrdiff_t>(runs_[i].parameters.size());
    FSDP_INVARIANT(steps.end() - next >= count);
    if (std::adjacent_find(next, next + count, std::not_equal_to<>()) != next + count) {
      split(i);  // this one again, now of one parameter
      continue;
    }
    runs_[i++].step.fill_(*next);
    next += count;
  }
}

Bytes ShardedOptimizer::state_bytes() const {
  Bytes total;
  for (const ShardRun& run : runs_) {
    for (const auto& state : run.state) total += Bytes(static_cast<std::int64_t>(state.nbytes()));
  }
  return total;
}

}  // namespace fsdp
