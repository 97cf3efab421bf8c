#include "fsdp/pipeline/step_driver.h"

#include <ATen/core/grad_mode.h>

#include <map>
#include <optional>
#include <set>
#include <utility>

#include "fsdp/base/check.h"

namespace fsdp::pipeline {

StepDriver::StepDriver(std::shared_ptr<FsdpContext> context, std::shared_ptr<StagedModel> model,
                       const StepOptions& options)
    : context_(std::move(context)),
      model_(std::move(model)),
      options_(options),
      ranges_(model_->layers()),
      lanes_(context_->mesh().runtime(), model_->exchange()),
      hooks_(std::make_shared<Hooks>(Hooks{.cursor = GatherCursor(options.gather_ahead)})) {
  FSDP_CHECK(options.gather_ahead >= 0, UsageError, "gather_ahead is {}, expected 0 or more", options.gather_ahead);
  FSDP_CHECK(context_->options().prefetch.kind != Prefetch::Kind::delayed_release, UsageError,
             "StepDriver gathers and drops units itself; it cannot work with Prefetch::delayed_release");
  FSDP_CHECK(context_->options().reduction.delay == 0, UsageError,
             "StepDriver reduces units as their gradients are complete; it cannot work with delayed reductions");
  context_->finalize();
  for (const auto& unit : context_->units()) {
    FSDP_CHECK(!unit->options().register_hooks, UsageError,
               "StepDriver: unit \"{}\" has hooks of its own; shard it with UnitOptions::register_hooks = false",
               unit->name());
  }
  for (int layer = 0; layer < model_->layers(); ++layer) {
    for (const NodeKind node : {NodeKind::dispatch, NodeKind::combine}) {
      FSDP_CHECK(
          model_->dense(layer) || model_->units(node, layer).empty(), UsageError,
          "StepDriver: node {} of layer {} reads weights; exchanges run on a stream of their own, where none may be "
          "read",
          node == NodeKind::dispatch ? "dispatch" : "combine", layer);
    }
  }
  for (const auto& unit : context_->units()) {
    unit->register_post_backward_hook([hooks = hooks_](FsdpModule& complete) {
      if (hooks->alive) complete.reduce_gradients();
    });
  }
}

StepDriver::~StepDriver() { hooks_->alive = false; }

std::vector<FsdpModule*> StepDriver::uses_of(const NodeCall& call) const {
  if (call.pass == Pass::weights) return {};  // weight gradients read no weights
  return model_->units(call.node, call.layer);
}

void StepDriver::start_cursor(const std::vector<NodeCall>& calls) {
  std::vector<FsdpModule*> uses;
  for (const auto& call : calls) {
    const auto some = uses_of(call);
    uses.insert(uses.end(), some.begin(), some.end());
  }
  hooks_->cursor.start(std::move(uses));
}

// C is the last forward node of a layer: its units are not needed until their backward.
void StepDriver::release_after_forward(const NodeCall& call) {
  if (call.pass != Pass::forward || call.node != NodeKind::combine) return;
  for (const NodeKind node : {NodeKind::attend, NodeKind::experts}) {
    for (FsdpModule* unit : model_->units(node, call.layer)) hooks_->cursor.release(*unit);
  }
}

std::vector<at::Tensor> StepDriver::run(std::vector<Microbatch> microbatches) {
  const int count = static_cast<int>(microbatches.size());
  FSDP_CHECK(count > 0, UsageError, "StepDriver: a step needs at least one microbatch");
  const at::AutoGradMode with_gradients(true);
  const auto step_scope = context_->step_scope();
  const MicrobatchOptions outer = context_->current_microbatch();
  const ChunkShape shape{model_->layers(), options_.delay_weights, options_.release_early};
  const auto steps = options_.schedule == Schedule::sequential ? sequential(count, shape) : one_f_one_b(count, shape);
  std::vector<NodeCall> all;
  for (const auto& step : steps) all.insert(all.end(), step.begin(), step.end());
  start_cursor(all);
  issued_.clear();
  // Units of both ends stay from one to the other.
  const auto first = model_->units(NodeKind::pre, -1);
  const std::set<const FsdpModule*> first_units(first.begin(), first.end());

  std::vector<at::Tensor> losses(microbatches.size());
  std::map<int, ChunkPlan> plans;
  for (const auto& step : steps) {
    bool last = false;  // whether this step holds the last backward
    for (const auto& call : step) last |= call.pass == Pass::backward && call.microbatch + 1 == count;
    const auto scope = context_->microbatch({.is_last = last && outer.is_last, .reduce = outer.reduce});
    for (const auto& call : step) {
      auto found = plans.find(call.microbatch);
      if (found == plans.end()) {
        auto& data = microbatches[static_cast<std::size_t>(call.microbatch)];
        found = plans
                    .try_emplace(call.microbatch, *model_, lanes_, ranges_, std::move(data), options_.delay_weights,
                                 1.0 / count)
                    .first;
      }
      const auto units = uses_of(call);
      found->second.run(call, [&] {
        for (FsdpModule* unit : units) hooks_->cursor.use(*unit);
      });
      issued_.push_back(call);
      if (call.pass == Pass::backward) {
        for (FsdpModule* unit : units) {
          if (call.node != NodeKind::post || !first_units.contains(unit)) hooks_->cursor.release(*unit);
        }
      }
      release_after_forward(call);
      if (call.node == NodeKind::loss && call.pass == Pass::forward)
        losses[static_cast<std::size_t>(call.microbatch)] = found->second.loss();
    }
    for (auto& [microbatch, plan] : plans) plan.join();
    for (const auto& call : step) {
      if (call.node == NodeKind::pre && call.pass == Pass::backward) plans.erase(call.microbatch);
    }
    lanes_.drop_retired();
    if (!last) continue;
    for (const auto& unit : context_->units()) unit->reshard();
    context_->finish_grad_sync();
  }
  FSDP_INVARIANT(hooks_->cursor.finished() && plans.empty());
  return losses;
}

Tensors StepDriver::forward_only(const Tensors& inputs, const Tensors* targets) {
  at::NoGradGuard no_grad;
  const auto step_scope = context_->step_scope();
  auto calls = merged_step(0, {.layers = model_->layers()}, std::nullopt, {});
  if (targets == nullptr) std::erase_if(calls, [](const NodeCall& call) { return call.node == NodeKind::loss; });
  start_cursor(calls);
  Tensors flow = inputs;
  std::optional<LayerCarry> carry;
  StagedModel::LayerFunctions functions;
  for (const auto& call : calls) {
    if (call.node == NodeKind::attend || call.layer < 0) carry.emplace();
    if (call.node == NodeKind::attend) functions = model_->layer_functions(call.layer, 1.0);
    for (FsdpModule* unit : uses_of(call)) hooks_->cursor.use(*unit);
    const NodeFunction f = call.node == NodeKind::pre        ? model_->pre_function()
                           : call.node == NodeKind::attend   ? functions.attend
                           : call.node == NodeKind::dispatch ? functions.dispatch
                           : call.node == NodeKind::experts  ? functions.experts
                           : call.node == NodeKind::combine  ? functions.combine
                           : call.node == NodeKind::post     ? model_->post_function()
                                                             : model_->loss_function();
    if (call.node == NodeKind::loss) flow.insert(flow.end(), targets->begin(), targets->end());
    flow = f(flow, *carry);
    release_after_forward(call);
  }
  for (const auto& unit : context_->units()) unit->reshard();
  return flow;
}

void StepDriver::reset() {
  const auto exchange = model_->exchange();
  if (exchange) exchange->abort("a rank resets its schedule");
  context_->reset();
  if (exchange) exchange->reset();
  lanes_.forget();
}

at::Tensor StepDriver::evaluate(const Microbatch& microbatch) {
  return forward_only(microbatch.inputs, &microbatch.targets)[0];
}

Tensors StepDriver::predict(const Tensors& inputs) { return forward_only(inputs, nullptr); }

}  // namespace fsdp::pipeline
