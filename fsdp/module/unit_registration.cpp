// The part of Scheduler that makes units of modules.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <torch/nn/modules/embedding.h>

#include <algorithm>
#include <cmath>
#include <typeinfo>

#include "fsdp/base/check.h"
#include "fsdp/module/hook_target.h"
#include "fsdp/module/hooked.h"
#include "fsdp/module/unit_plan.h"

namespace fsdp {
namespace {

// The same axes with whole weights on every rank: how small parameters rest.
Strategy left_replicated(const Strategy& strategy) {
  Strategy whole = ddp(strategy.axes);
  whole.name = strategy.name + ", small ones replicated";
  return whole;
}

// A type derived from it by a user may read its weight in ways of its own.
bool is_plain_embedding(const torch::nn::Module& module) {
  return typeid(module) == typeid(Hooked<torch::nn::EmbeddingImpl>) ||
         typeid(module) == typeid(torch::nn::EmbeddingImpl);
}

// Such a forward rescales rows of the weight in place: of the gathered copy, which the shards never see.
void refuse_renormalization(const torch::nn::Module& module) {
  const auto refuse = [&](const std::optional<double>& max_norm, const std::string& name) {
    FSDP_CHECK(!max_norm, UsageError,
               "fully_shard: {} has max_norm = {}, which changes its weight inside forward: that cannot be sharded; "
               "rescale the leaves after the optimizer step instead",
               name, *max_norm);
  };
  for (const auto& child : module.modules()) {
    if (const auto* embedding = child->as<torch::nn::Embedding>()) refuse(embedding->options.max_norm(), child->name());
    if (const auto* bag = child->as<torch::nn::EmbeddingBag>()) refuse(bag->options.max_norm(), child->name());
  }
}

}  // namespace

FsdpModule& Scheduler::add_unit(std::vector<std::shared_ptr<torch::nn::Module>> modules, const UnitOptions& options) {
  // Everything that can be wrong is found before anything is changed.
  FSDP_CHECK(!finalized_, UsageError, "fully_shard after the first forward: make all units before the context is used");
  FSDP_CHECK(!modules.empty(), UsageError, "fully_shard: no module given");
  options.placements.validate();
  auto sub_mesh = std::make_shared<const SubMesh>(mesh_, options.placements.axes);
  FSDP_CHECK(options.gradient_divisor.value_or(1) > 0 && std::isfinite(options.gradient_divisor.value_or(1)),
             UsageError, "fully_shard: gradient_divisor is {}, expected a finite number above 0",
             *options.gradient_divisor);
  FSDP_CHECK(options.replicate_up_to >= 0, UsageError,
             "fully_shard: replicate_up_to is {}, expected 0 or more elements", options.replicate_up_to);
  for (const auto& dtype : {options.mixed_precision.param_dtype, options.mixed_precision.reduce_dtype,
                            options.mixed_precision.main_param_dtype, options.mixed_precision.main_grad_dtype,
                            options.mixed_precision.output_dtype, options.mixed_precision.buffer_dtype}) {
    const auto value = dtype.value_or(c10::kFloat);
    FSDP_CHECK(value == c10::kFloat || value == c10::kDouble || value == c10::kBFloat16 || value == c10::kHalf,
               UsageError,
               "fully_shard: the mixed precision policy asks for {}; expected Float, Double, BFloat16 or Half",
               c10::toString(value));
  }
  for (std::size_t m = 0; m < modules.size(); ++m) {
    const auto& module = modules[m];
    FSDP_CHECK(module != nullptr, UsageError, "fully_shard: a module is null");
    FSDP_CHECK(std::find(modules.begin(), modules.begin() + static_cast<std::ptrdiff_t>(m), module) ==
                   modules.begin() + static_cast<std::ptrdiff_t>(m),
               UsageError, "fully_shard: module {} is given twice", module->name());
    FSDP_CHECK(!unit_of_module_.contains(module.get()), UsageError, "fully_shard: module {} is a unit already",
               module->name());
    const auto* target = dynamic_cast<const HookTarget*>(module.get());
    FSDP_CHECK(target == nullptr || target->unit() == nullptr, UsageError,
               "fully_shard: module {} is a unit of another context", module->name());
    FSDP_CHECK(target != nullptr || !options.register_hooks, UsageError,
               "fully_shard: module {} has no hooks: declare its holder with FSDP_MODULE, wrap its type in "
               "fsdp::Hooked, or set register_hooks = false and drive the unit yourself",
               module->name());
  }
  for (const auto& module : modules) refuse_renormalization(*module);
  UnitPlan plan{modules, options};
  plan_parameters(plan);

  const int index = static_cast<int>(units_.size());
  auto unit = std::make_shared<FsdpModule>(*this, index, modules, options);
  unit->backward_reads_weights_ = options.backward_reads_weights.value_or(
      !std::all_of(modules.begin(), modules.end(), [](const auto& module) { return is_plain_embedding(*module); }));
  for (GroupPlan& group : plan.groups) {
    std::vector<const void*> impls;
    for (const auto& info : group.parameters) {
      impls.push_back(info.parameter.unsafeGetTensorImpl());
      if (info.parameter.numel() == 0) continue;
      const auto bytes = static_cast<std::int64_t>(info.parameter.element_size());
      const auto begin = info.parameter.storage_offset() * bytes;
      former_memory_.push_back(
          {c10::weak_intrusive_ptr<c10::StorageImpl>(info.parameter.storage().getWeakStorageImpl()), begin,
           begin + info.parameter.numel() * bytes, impls.back()});
    }
    const auto aliases = group.parameters;  // of each parameter
    unit->groups_.push_back(std::make_unique<FsdpParameterGroup>(
        *unit, sub_mesh, group.replicated ? left_replicated(options.placements) : options.placements,
        std::move(group.parameters), group.dtypes, options_.sync_module_states));
    FsdpParameterGroup& made = *unit->groups_.back();
    for (std::size_t i = 0; i < impls.size(); ++i) {
      owners_[impls[i]] = {&made, static_cast<int>(i)};
      for (const auto& alias : aliases[i].aliases) owners_[alias.unsafeGetTensorImpl()] = {&made, static_cast<int>(i)};
    }
    unit->trainable_count_ += made.expected_arrivals();
    unit->gets_stale_ |= made.gets_stale();
    if (made.releasable()) {
      unit->releasable_ = true;
      unit->gathered_bytes_ += made.whole_bytes();
    }
  }
  for (const auto& alias : plan.aliases) {
    alias.owner.group->add_alias(alias.owner.index, alias.tensor);
    owners_[alias.tensor.unsafeGetTensorImpl()] = alias.owner;
  }
  for (int lender : plan.lenders) {
    unit->lenders_.push_back(units_[lender].get());
    units_[lender]->lends_ = true;
  }
  unit->buffers_ = std::move(plan.buffers);
  at::NoGradGuard no_grad;
  for (auto& buffer : unit->buffers_) {
    const auto& dtype = options.mixed_precision.buffer_dtype;
    if (dtype && buffer.tensor.is_floating_point()) buffer.tensor.set_data(buffer.tensor.to(*dtype));
    if (runtime().device().is_cuda() && buffer.tensor.is_cpu())
      buffer.tensor.set_data(buffer.tensor.to(runtime().device()));
    unit->buffers_on_meta_ |= buffer.tensor.is_meta() && !runtime().device().is_meta();
  }
  if (!unit->buffers_on_meta_) synchronize_buffers(*unit);
  for (const auto& module : modules) unit_of_module_[module.get()] = index;
  units_.push_back(unit);
  return *unit;
}

// Rank 0's values, whatever is saved with the model and whatever is not.
void Scheduler::synchronize_buffers(FsdpModule& unit) const {
  if (!options_.sync_module_states || runtime().device().is_meta()) return;
  at::NoGradGuard no_grad;
  const SubMesh mesh(mesh_, unit.options().placements.axes);
  const Stream stream = compute_stream();
  for (auto& buffer : unit.buffers_) {
    const at::Tensor values = buffer.tensor.contiguous();
    for (std::size_t axis = 0; axis < unit.options().placements.axes.size(); ++axis) {
      mesh.communicator(static_cast<int>(axis), Use::gather)
          .broadcast(values.mutable_data_ptr(), Elements(static_cast<std::int64_t>(values.nbytes())), c10::kByte,
                     Rank(0), stream, "FSDP:broadcast of buffers");
    }
    stream.synchronize();
    if (!values.is_same(buffer.tensor)) buffer.tensor.copy_(values);
  }
}

void Scheduler::materialize_buffers(const std::function<void(const std::string&, at::Tensor&)>& fill) {
  at::NoGradGuard no_grad;
  for (auto& unit : units_) {
    if (!unit->buffers_on_meta_) continue;
    for (auto& buffer : unit->buffers_) {
      if (!buffer.tensor.is_meta()) continue;
      const at::Tensor values = at::empty_like(buffer.tensor, at::TensorOptions().device(runtime().device()));
      buffer.tensor.unsafeGetTensorImpl()->shallow_copy_from(values.getIntrusivePtr());
      fill(buffer.name, buffer.tensor);
    }
    unit->buffers_on_meta_ = false;
    synchronize_buffers(*unit);
  }
}

void Scheduler::set_prefetch_list(Phase phase, const FsdpModule& unit, const std::vector<FsdpModule*>& targets) {
  FSDP_CHECK(options_.prefetch.kind == Prefetch::Kind::lists, UsageError,
             "prefetch lists need ContextOptions::prefetch = Prefetch::lists()");
  std::vector<int> indices;
  for (const FsdpModule* target : targets) {
    FSDP_CHECK(target != nullptr && target->index() < static_cast<int>(units_.size()) &&
                   units_[target->index()].get() == target,
               UsageError, "the prefetch list of unit \"{}\" names a unit that is not of this context", unit.name());
    indices.push_back(target->index());
  }
  if (finalized_)
    prefetch_table_.set(phase, unit.index(), std::move(indices));
  else
    pending_lists_.push_back({{phase, unit.index()}, std::move(indices)});
}

}  // namespace fsdp
