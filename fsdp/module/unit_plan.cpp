// The part of Scheduler that decides which parameters a new unit owns, and which it shares with earlier ones.
#include "fsdp/module/unit_plan.h"

#include <ATen/ops/empty.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "fsdp/base/check.h"
#include "fsdp/module/hook_target.h"

namespace fsdp {
namespace {

FsdpParameterGroup::Dtypes dtypes_of(const at::Tensor& parameter, const std::string& name,
                                     const MixedPrecisionPolicy& policy) {
  const auto built = parameter.scalar_type();
  const bool keep = policy.keep_dtype && policy.keep_dtype(name, parameter);
  FsdpParameterGroup::Dtypes dtypes;
  dtypes.compute = keep ? built : policy.param_dtype.value_or(built);
  dtypes.reduce = keep ? built : policy.reduce_dtype.value_or(dtypes.compute);
  dtypes.main = policy.main_param_dtype.value_or(built);
  dtypes.gradient = policy.main_grad_dtype.value_or(dtypes.main);
  return dtypes;
}

// The bytes of its storage that a dense tensor covers.
std::pair<std::int64_t, std::int64_t> byte_range(const at::Tensor& tensor) {
  const auto size = static_cast<std::int64_t>(tensor.element_size());
  return {tensor.storage_offset() * size, (tensor.storage_offset() + tensor.numel()) * size};
}

bool same_place(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.strides() == b.strides() && a.scalar_type() == b.scalar_type() &&
         a.storage_offset() == b.storage_offset();
}

std::string describe(const at::Tensor& tensor) {
  return fmt::format("{} of {}", c10::toString(tensor.scalar_type()), fmt::join(tensor.sizes(), "x"));
}

}  // namespace

bool Scheduler::contains(const FsdpModule& unit, const torch::nn::Module& module) const {
  return std::any_of(unit.modules_.begin(), unit.modules_.end(), [&](const auto& top) {
    const auto all = top->modules(/*include_self=*/true);
    return std::any_of(all.begin(), all.end(), [&](const auto& inner) { return inner.get() == &module; });
  });
}

// `parameter` shows the values of one that an earlier unit owns.
void Scheduler::plan_tied(UnitPlan& plan, const at::Tensor& parameter, const std::string& name,
                          const void* owner_impl) const {
  const OwnedParameter owner = owners_.at(owner_impl);
  const FsdpModule& unit = owner.group->unit();
  const ParameterInfo& owned = owner.group->parameters()[owner.index];
  for (const auto& module : plan.modules) {
    FSDP_CHECK(!contains(unit, *module), UsageError,
               "fully_shard: parameter \"{}\" of {} already belongs to unit {} ({}), which contains that module. Make "
               "children units before their parents, each once",
               name, module->name(), unit.index(), unit.modules_.front()->name());
  }
  FSDP_CHECK(
      plan.options.register_hooks && unit.options().register_hooks, UsageError,
      "fully_shard: parameter \"{}\" is tied to \"{}\" of unit {}; weights shared by two units need hooks in both: "
      "untie them in a caller-driven schedule, or put both uses into one unit",
      name, owned.name, unit.index());
  const auto& wanted = plan.options.mixed_precision.param_dtype;
  FSDP_CHECK(
      !wanted || *wanted == owner.group->dtypes().compute, UsageError,
      "fully_shard: parameter \"{}\" is tied to \"{}\" of unit {}, which computes in {}; this unit's policy says {}: "
      "units that share a weight must agree on param_dtype",
      name, owned.name, unit.index(), c10::toString(owner.group->dtypes().compute),
      c10::toString(wanted.value_or(c10::kFloat)));
  plan.lenders.insert(unit.index());
  if (owner_impl == parameter.unsafeGetTensorImpl()) return;
  FSDP_CHECK(
      parameter.sizes() == at::IntArrayRef(owned.sizes), UsageError,
      "fully_shard: parameter \"{}\" ({}) shares memory with \"{}\" of unit {}, which has another shape: use one "
      "tensor for both",
      name, describe(parameter), owned.name, unit.index());
  FSDP_CHECK(parameter.requires_grad() == owned.parameter.requires_grad(), UsageError,
             "fully_shard: parameter \"{}\" is tied to \"{}\" of unit {}, but only one of them requires a gradient",
             name, owned.name, unit.index());
  plan.aliases.push_back({owner, parameter});
}

void Scheduler::plan_parameter(UnitPlan& plan, const at::Tensor& parameter, const std::string& name,
                               int module_index) const {
  if (!parameter.defined() || !plan.seen.insert(parameter.unsafeGetTensorImpl()).second) return;
  if (owners_.contains(parameter.unsafeGetTensorImpl()))
    return plan_tied(plan, parameter, name, parameter.unsafeGetTensorImpl());
  FSDP_CHECK(parameter.is_floating_point(), UsageError,
             "fully_shard: parameter \"{}\" is {}; only floating-point parameters can be sharded", name,
             c10::toString(parameter.scalar_type()));
  FSDP_CHECK(parameter.is_leaf(), UsageError,
             "fully_shard: parameter \"{}\" is the result of an operation; shard leaves only", name);
  FSDP_CHECK(parameter.layout() == c10::kStrided, UsageError,
             "fully_shard: parameter \"{}\" is not dense; only dense parameters can be sharded", name);
  const c10::Device device = runtime().device();
  // From the CPU values move to a GPU here.
  FSDP_CHECK(parameter.is_meta() || parameter.device() == device || device.is_meta() ||
                 (parameter.is_cpu() && device.is_cuda()),
             UsageError, "fully_shard: parameter \"{}\" is on {}, expected {} or meta", name, parameter.device().str(),
             runtime().device().str());
  if (parameter.numel() > 0) {
    const auto [begin, end] = byte_range(parameter);
    auto* storage = parameter.storage().unsafeGetStorageImpl();
    FSDP_CHECK(
        parameter.is_meta() || storage->_mutable_data_ptr_no_checks().get() != nullptr, UsageError,
        "fully_shard: parameter \"{}\" has no data: the FsdpContext that sharded it was destroyed. Keep a context as "
        "long as its model, or build the model anew",
        name);
    for (const FormerMemory& former : former_memory_) {
      if (former.storage._unsafe_get_target() != storage || begin >= former.end || end <= former.begin) continue;
      const auto owner = owners_.at(former.parameter);
      FSDP_CHECK(
          begin == former.begin && end == former.end, UsageError,
          "fully_shard: parameter \"{}\" ({}) overlaps the memory of \"{}\" of unit {}: parameters must be apart, or "
          "be one tensor",
          name, describe(parameter), owner.group->parameters()[owner.index].name, owner.group->unit().index());
      return plan_tied(plan, parameter, name, former.parameter);
    }
    for (GroupPlan& group : plan.groups) {
      for (ParameterInfo& info : group.parameters) {
        if (info.parameter.storage().unsafeGetStorageImpl() != storage || info.parameter.numel() == 0) continue;
        const auto [other_begin, other_end] = byte_range(info.parameter);
        if (begin >= other_end || end <= other_begin) continue;
        FSDP_CHECK(
            same_place(parameter, info.parameter), UsageError,
            "fully_shard: parameters \"{}\" ({}) and \"{}\" ({}) overlap in memory: parameters must be apart, or be "
            "one tensor",
            info.name, describe(info.parameter), name, describe(parameter));
        FSDP_CHECK(parameter.requires_grad() == info.parameter.requires_grad(), UsageError,
                   "fully_shard: parameters \"{}\" and \"{}\" share memory, but only one of them requires a gradient",
                   info.name, name);
        info.aliases.push_back(parameter);
        return;
      }
    }
  }
  const auto dtypes = dtypes_of(parameter, name, plan.options.mixed_precision);
  const bool replicated = parameter.numel() <= plan.options.replicate_up_to;
  auto group = std::find_if(plan.groups.begin(), plan.groups.end(), [&](const GroupPlan& g) {
    return g.dtypes == dtypes && g.trainable == parameter.requires_grad() && g.replicated == replicated;
  });
  if (group == plan.groups.end())
    group = plan.groups.insert(plan.groups.end(), GroupPlan{dtypes, parameter.requires_grad(), replicated, {}});
  ParameterInfo info;
  info.name = name;
  info.module_index = module_index;
  info.parameter = parameter;
  info.sizes = parameter.sizes().vec();
  info.strides = parameter.is_non_overlapping_and_dense()
                     ? parameter.strides().vec()
                     : at::empty(parameter.sizes(), parameter.options().device(at::kMeta)).strides().vec();
  group->parameters.push_back(std::move(info));
}

void Scheduler::plan_parameters(UnitPlan& plan) const {
  std::set<const torch::nn::Module*> members;
  for (const auto& module : plan.modules) members.insert(module.get());
  std::set<const void*> seen_buffers;
  for (std::size_t m = 0; m < plan.modules.size(); ++m) {
    const std::function<void(torch::nn::Module&, const std::string&)> visit = [&](torch::nn::Module& module,
                                                                                  const std::string& path) {
      if (&module != plan.modules[m].get()) {
        if (unit_of_module_.contains(&module)) return;  // nested: owns its own
        FSDP_CHECK(!members.contains(&module), UsageError,
                   "fully_shard: module {} is inside another module of the same unit", path);
        const auto* target = dynamic_cast<const HookTarget*>(&module);
        FSDP_CHECK(target == nullptr || target->unit() == nullptr, UsageError,
                   "fully_shard: \"{}\" below it is a unit of another context", path);
      }
      const auto full = [&](const std::string& key) { return path.empty() ? key : path + "." + key; };
      for (const auto& item : module.named_parameters(/*recurse=*/false))
        plan_parameter(plan, item.value(), full(item.key()), static_cast<int>(m));
      for (const auto& item : module.named_buffers(/*recurse=*/false)) {
        if (item.value().defined() && seen_buffers.insert(item.value().unsafeGetTensorImpl()).second)
          plan.buffers.push_back({full(item.key()), static_cast<int>(m), item.value()});
      }
      for (const auto& child : module.named_children()) visit(*child.value(), full(child.key()));
    };
    visit(*plan.modules[m], "");
  }
}

}  // namespace fsdp
