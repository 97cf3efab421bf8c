#include "fsdp/pipeline/step_driver.h"

#include <ATen/core/grad_mode.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/fingerprint.h"

namespace fsdp::pipeline {

namespace {

const std::shared_ptr<StagedModel>& first_of(const std::vector<std::shared_ptr<StagedModel>>& chunks) {
  FSDP_CHECK(!chunks.empty() && std::none_of(chunks.begin(), chunks.end(), [](const auto& c) { return c == nullptr; }),
             UsageError, "StepDriver: expected at least one part of a model");
  return chunks.front();
}

// Where a step has issued the layers of both its microbatches: what is left sends to other stages, or hides that.
std::size_t end_of_layers(const std::vector<NodeCall>& step) {
  std::size_t end = 0;
  for (std::size_t i = 0; i < step.size(); ++i) {
    if (step[i].layer >= 0 && step[i].pass != Pass::weights) end = i + 1;
  }
  return end;
}

// Drivers that live, by their context: the hooks of two would reduce each unit twice.
struct Drivers {
  std::mutex mutex;  // ranks may be threads
  std::set<const FsdpContext*> contexts;
};
Drivers& drivers() {
  static auto* instance = new Drivers;
  return *instance;
}

}  // namespace

StepDriver::StepDriver(std::shared_ptr<FsdpContext> context, std::shared_ptr<StagedModel> model,
                       const StepOptions& options)
    : StepDriver(std::move(context), std::vector<std::shared_ptr<StagedModel>>{std::move(model)}, nullptr, options) {}

StepDriver::StepDriver(std::shared_ptr<FsdpContext> context, std::vector<std::shared_ptr<StagedModel>> chunks,
                       std::shared_ptr<StageChannels> channels, const StepOptions& options)
    : context_(std::move(context)),
      chunks_(std::move(chunks)),
      channels_(std::move(channels)),
      options_(options),
      lanes_(context_->mesh().runtime(), first_of(chunks_)->exchange()),
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
  const int count = static_cast<int>(chunks_.size());
  const int stages = channels_ ? channels_->stages() : 1, stage = channels_ ? channels_->stage() : 0;
  FSDP_CHECK(stages > 1 || count == 1, UsageError,
             "StepDriver: {} parts of a model need StageChannels between at least two stages", count);
  FSDP_CHECK(!channels_ || channels_->all_equal(count), UsageError,
             "StepDriver: stages hold different numbers of parts of the model; this one, {} of {}, holds {}", stage,
             stages, count);
  for (int c = 0; c < count; ++c) {
    const StagedModel& chunk = *chunks_[static_cast<std::size_t>(c)];
    const bool first = stage == 0 && c == 0, last = stage + 1 == stages && c + 1 == count;
    FSDP_CHECK(
        chunk.first() == first && chunk.last() == last, UsageError,
        "StepDriver: chunk {} of stage {} {} with the embedding and {} with the loss; the first part of a model, and "
        "no other, begins so, the last one, and no other, ends so",
        c, stage, chunk.first() ? "begins" : "does not begin", chunk.last() ? "ends" : "does not end");
    FSDP_CHECK(chunk.exchange() == chunks_.front()->exchange(), UsageError,
               "StepDriver: chunks 0 and {} have different exchanges; their tokens must go one way, in one order", c);
    ranges_.emplace_back(chunk.layers(), c);
    for (int layer = 0; layer < chunk.layers(); ++layer) {
      for (const NodeKind node : {NodeKind::dispatch, NodeKind::combine}) {
        FSDP_CHECK(chunk.dense(layer) || chunk.units(node, layer).empty(), UsageError,
                   "StepDriver: node {} of layer {} reads weights; exchanges run on a stream of their own, where none "
                   "may be read",
                   node == NodeKind::dispatch ? "dispatch" : "combine", layer);
      }
    }
  }
  {
    std::lock_guard lock(drivers().mutex);
    FSDP_CHECK(drivers().contexts.insert(context_.get()).second, UsageError,
               "StepDriver: another driver of this context lives; destroy it first");
  }
  for (const auto& unit : context_->units()) {
    unit->register_post_backward_hook([hooks = hooks_](FsdpModule& complete) {
      if (hooks->alive) complete.reduce_gradients();
    });
  }
}

StepDriver::~StepDriver() {
  hooks_->alive = false;
  std::lock_guard lock(drivers().mutex);
  drivers().contexts.erase(context_.get());
}

std::vector<FsdpModule*> StepDriver::uses_of(const NodeCall& call) const {
  if (call.pass == Pass::weights) return {};  // weight gradients read no weights
  if (call.node == NodeKind::previous || call.node == NodeKind::next) return {};
  return chunk_of(call).units(call.node, call.layer);
}

void StepDriver::start_cursor(const std::vector<NodeCall>& calls) {
  std::vector<FsdpModule*> uses;
  for (const auto& call : calls) {
    const auto some = uses_of(call);
    uses.insert(uses.end(), some.begin(), some.end());
  }
  hooks_->cursor.start(std::move(uses));
}

// C is the last forward node of a layer: its units are not needed until their backward. Nor are those of an end of the
// model, where the other end is another part.
void StepDriver::release_after_forward(const NodeCall& call) {
  if (call.pass != Pass::forward) return;
  const StagedModel& chunk = chunk_of(call);
  const bool one_end = chunk.first() != chunk.last();
  if (one_end && (call.node == NodeKind::pre || call.node == NodeKind::post)) {
    for (FsdpModule* unit : uses_of(call)) hooks_->cursor.release(*unit);
  }
  if (call.node != NodeKind::combine) return;
  for (const NodeKind node : {NodeKind::attend, NodeKind::experts}) {
    for (FsdpModule* unit : chunk_of(call).units(node, call.layer)) hooks_->cursor.release(*unit);
  }
}

std::vector<std::vector<NodeCall>> StepDriver::steps(int microbatches) const {
  PipelineShape shape;
  shape.chunks.clear();
  for (const auto& chunk : chunks_)
    shape.chunks.push_back({.layers = chunk->layers(),
                            .delay_weights = options_.delay_weights,
                            .release_early = options_.release_early,
                            .chunk = static_cast<int>(shape.chunks.size()),
                            .first = chunk->first(),
                            .last = chunk->last()});
  const bool merged = options_.schedule == Schedule::one_f_one_b;
  if (!channels_)
    return merged ? one_f_one_b(microbatches, shape.chunks[0]) : sequential(microbatches, shape.chunks[0]);
  shape.stages = channels_->stages();
  shape.stage = channels_->stage();
  return pipeline_steps(microbatches, shape, merged);
}

void StepDriver::check_stages_agree(const char* call, const std::vector<const Microbatch*>& microbatches) const {
  if (!channels_) return;
  std::string description = call;
  for (const Microbatch* microbatch : microbatches) {
    description += ";";
    for (const at::Tensor& input : microbatch->inputs) description += fmt::format(" {}", fmt::join(input.sizes(), "x"));
  }
  FSDP_CHECK(channels_->all_equal(fingerprint(description)), UsageError,
             "StepDriver: pipeline stage {} of {} calls {} with {} microbatches, the first with inputs of sizes {}; "
             "another stage makes another call, or has another number of microbatches, or other sizes. All stages "
             "make the same calls with the same microbatches",
             channels_->stage(), channels_->stages(), call, microbatches.size(),
             microbatches.front()->inputs.empty()
                 ? "none"
                 : fmt::format("{}", fmt::join(microbatches.front()->inputs[0].sizes(), "x")));
}

void StepDriver::expect_arrivals(const std::vector<NodeCall>& step, const std::vector<Microbatch>& microbatches) {
  for (const auto& call : step) {
    if (!arrives(call)) continue;
    using Way = StageChannels::Way;
    channels_->expect(call.pass == Pass::forward ? Way::activations : Way::gradients,
                      chunk_of(call).boundary(microbatches[static_cast<std::size_t>(call.microbatch)]));
  }
}

std::vector<at::Tensor> StepDriver::run(std::vector<Microbatch> microbatches) {
  const int count = static_cast<int>(microbatches.size());
  FSDP_CHECK(count > 0, UsageError, "StepDriver: a step needs at least one microbatch");
  const at::AutoGradMode with_gradients(true);
  std::vector<const Microbatch*> given;
  for (const auto& microbatch : microbatches) given.push_back(&microbatch);
  check_stages_agree("run", given);
  const auto step_scope = context_->step_scope();
  const MicrobatchOptions outer = context_->current_microbatch();
  const auto steps = this->steps(count);
  std::vector<NodeCall> all;
  for (const auto& step : steps) all.insert(all.end(), step.begin(), step.end());
  start_cursor(all);
  issued_.clear();
  // Units of both ends of a chunk stay from one to the other.
  std::set<const FsdpModule*> first_units;
  for (const auto& chunk : chunks_) {
    if (!chunk->first()) continue;
    const auto some = chunk->units(NodeKind::pre, -1);
    first_units.insert(some.begin(), some.end());
  }

  std::vector<at::Tensor> losses(microbatches.size());
  std::map<std::pair<int, int>, ChunkPlan> plans;  // [microbatch, chunk]
  if (channels_) expect_arrivals(steps.front(), microbatches);
  for (std::size_t s = 0; s < steps.size(); ++s) {
    const auto& step = steps[s];
    const bool ends = s + 1 == steps.size();
    const std::size_t layers_end = end_of_layers(step);
    bool last = false;  // whether this step holds a chunk's last backward
    for (const auto& call : step) last |= call.pass == Pass::backward && call.microbatch + 1 == count;
    const auto scope = context_->microbatch({.is_last = last && outer.is_last, .reduce = outer.reduce});
    for (std::size_t i = 0; i < step.size(); ++i) {
      if (channels_ && i == layers_end && !ends) expect_arrivals(steps[s + 1], microbatches);
      const NodeCall& call = step[i];
      const std::pair<int, int> key{call.microbatch, call.chunk};
      auto found = plans.find(key);
      if (found == plans.end()) {
        found = plans
                    .try_emplace(key, chunk_of(call), lanes_, ranges_[static_cast<std::size_t>(call.chunk)],
                                 channels_.get(), microbatches[static_cast<std::size_t>(call.microbatch)],
                                 options_.delay_weights, 1.0 / count)
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
    if (channels_ && layers_end == step.size() && !ends) expect_arrivals(steps[s + 1], microbatches);
    for (auto& [key, plan] : plans) plan.join();
    for (const auto& call : step) {
      const bool over = call.pass == Pass::backward && (call.node == NodeKind::pre || call.node == NodeKind::previous);
      if (over) plans.erase({call.microbatch, call.chunk});
    }
    lanes_.drop_retired();
    if (!ends) continue;
    for (const auto& unit : context_->units()) unit->reshard();
    context_->finish_grad_sync();
  }
  FSDP_INVARIANT(hooks_->cursor.finished() && plans.empty());
  return losses;
}

Tensors StepDriver::forward_only(const Microbatch& microbatch, bool with_loss) {
  at::NoGradGuard no_grad;
  check_stages_agree(with_loss ? "evaluate" : "predict", {&microbatch});
  const auto step_scope = context_->step_scope();
  std::vector<NodeCall> calls;
  for (std::size_t c = 0; c < chunks_.size(); ++c) {
    const auto some = merged_step(0,
                                  {.layers = chunks_[c]->layers(),
                                   .chunk = static_cast<int>(c),
                                   .first = chunks_[c]->first(),
                                   .last = chunks_[c]->last()},
                                  std::nullopt, {});
    calls.insert(calls.end(), some.begin(), some.end());
  }
  if (!with_loss) std::erase_if(calls, [](const NodeCall& call) { return call.node == NodeKind::loss; });
  start_cursor(calls);
  Tensors flow;
  std::optional<LayerCarry> carry;
  StagedModel::LayerFunctions functions;
  const Stream compute = lanes_.stream(Lane::compute);
  for (const auto& call : calls) {
    StagedModel& chunk = chunk_of(call);
    if (call.node == NodeKind::previous) {
      channels_->expect(StageChannels::Way::activations, chunk.boundary(microbatch));
      Event arrived;
      flow = {channels_->take(StageChannels::Way::activations, arrived)};
      compute.wait(arrived);
      continue;
    }
    if (call.node == NodeKind::next) {
      Event ready;
      flow[0] = flow[0].contiguous();
      compute.record(ready);
      channels_->send(StageChannels::Way::activations, flow[0], ready);
      flow.clear();
      continue;
    }
    if (call.node == NodeKind::pre) flow = microbatch.inputs;
    if (call.node == NodeKind::attend || call.layer < 0) carry.emplace();
    if (call.node == NodeKind::attend) functions = chunk.layer_functions(call.layer, 1.0);
    for (FsdpModule* unit : uses_of(call)) hooks_->cursor.use(*unit);
    const NodeFunction f = call.node == NodeKind::pre        ? chunk.pre_function()
                           : call.node == NodeKind::attend   ? functions.attend
                           : call.node == NodeKind::dispatch ? functions.dispatch
                           : call.node == NodeKind::experts  ? functions.experts
                           : call.node == NodeKind::combine  ? functions.combine
                           : call.node == NodeKind::post     ? chunk.post_function()
                                                             : chunk.loss_function();
    if (call.node == NodeKind::loss) flow.insert(flow.end(), microbatch.targets.begin(), microbatch.targets.end());
    flow = f(flow, *carry);
    release_after_forward(call);
  }
  for (const auto& unit : context_->units()) unit->reshard();
  return flow;
}

void StepDriver::reset() {
  const auto exchange = chunks_.front()->exchange();
  if (exchange) exchange->abort("a rank resets its schedule");
  if (channels_) channels_->abort("a rank resets its schedule");
  context_->reset();
  if (exchange) exchange->reset();
  if (channels_) channels_->reset();
  lanes_.forget();
}

at::Tensor StepDriver::evaluate(const Microbatch& microbatch) {
  const Tensors flow = forward_only(microbatch, /*with_loss=*/true);
  return flow.empty() ? at::Tensor() : flow[0];
}

Tensors StepDriver::predict(const Tensors& inputs) { return forward_only({inputs, {}}, /*with_loss=*/false); }

}  // namespace fsdp::pipeline
