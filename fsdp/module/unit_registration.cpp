// The part of Scheduler that builds units: which parameters a unit owns, names, tree, orders.
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <set>

#include "fsdp/base/check.h"
#include "fsdp/base/log.h"
#include "fsdp/module/hook_target.h"
#include "fsdp/module/scheduler.h"

namespace fsdp {
namespace {

FsdpParameterGroup::Dtypes dtypes_of(const at::Tensor& parameter, const MixedPrecisionPolicy& policy) {
  FsdpParameterGroup::Dtypes dtypes;
  dtypes.compute = policy.param_dtype.value_or(parameter.scalar_type());
  dtypes.reduce = policy.reduce_dtype.value_or(dtypes.compute);
  dtypes.main = policy.main_param_dtype.value_or(parameter.scalar_type());
  return dtypes;
}

struct GroupPlan {
  FsdpParameterGroup::Dtypes dtypes;
  bool trainable;
  std::vector<ParameterInfo> parameters;
};

std::string describe_modules(const std::vector<std::shared_ptr<torch::nn::Module>>& modules) {
  std::string text;
  for (const auto& module : modules) text += (text.empty() ? "" : ", ") + module->name();
  return text;
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
  std::set<const torch::nn::Module*> members;
  for (const auto& module : modules) {
    FSDP_CHECK(module != nullptr, UsageError, "fully_shard: a module is null");
    FSDP_CHECK(members.insert(module.get()).second, UsageError, "fully_shard: module {} is given twice",
               module->name());
    FSDP_CHECK(!unit_of_module_.contains(module.get()), UsageError, "fully_shard: module {} is a unit already",
               module->name());
    const auto* target = dynamic_cast<const HookTarget*>(module.get());
    FSDP_CHECK(target == nullptr || target->unit() == nullptr, UsageError,
               "fully_shard: module {} is a unit of another context", module->name());
    FSDP_CHECK(target != nullptr || !options.register_hooks, UsageError,
               "fully_shard: module {} has no hooks: declare its holder with FSDP_MODULE, wrap its type in "
               "fsdp::Hooked, or set register_hooks = false and drive "
               "the unit yourself",
               module->name());
  }

  std::vector<GroupPlan> plans;
  std::set<const void*> seen;
  for (std::size_t m = 0; m < modules.size(); ++m) {
    const std::function<void(torch::nn::Module&, const std::string&)> visit = [&](torch::nn::Module& module,
                                                                                  const std::string& path) {
      if (&module != modules[m].get()) {
        if (unit_of_module_.contains(&module)) return;  // nested: owns its own
        FSDP_CHECK(!members.contains(&module), UsageError,
                   "fully_shard: module {} is inside another module of the same unit", path);
        const auto* target = dynamic_cast<const HookTarget*>(&module);
        FSDP_CHECK(target == nullptr || target->unit() == nullptr, UsageError,
                   "fully_shard: \"{}\" below it is a unit of another context", path);
      }
      for (const auto& item : module.named_parameters(/*recurse=*/false)) {
        const at::Tensor& parameter = item.value();
        const std::string name = path.empty() ? item.key() : path + "." + item.key();
        if (!parameter.defined() || seen.contains(parameter.unsafeGetTensorImpl())) continue;
        if (const auto owner = owner_of_parameter_.find(parameter.unsafeGetTensorImpl());
            owner != owner_of_parameter_.end()) {
          detail::fail<UsageError>(
              "fully_shard: parameter \"{}\" of {} already belongs to unit {} ({}). Make children units before their "
              "parents, each once; weights shared by two "
              "units are not supported: put both uses into one unit",
              name, modules[m]->name(), owner->second, describe_modules(units_[owner->second]->modules_));
        }
        FSDP_CHECK(parameter.is_floating_point(), UsageError,
                   "fully_shard: parameter \"{}\" is {}; only floating-point parameters can be sharded", name,
                   c10::toString(parameter.scalar_type()));
        FSDP_CHECK(parameter.is_leaf(), UsageError,
                   "fully_shard: parameter \"{}\" is the result of an operation; shard leaves only", name);
        FSDP_CHECK(parameter.is_meta() || parameter.device() == runtime().device() || runtime().device().is_meta(),
                   UsageError, "fully_shard: parameter \"{}\" is on {}, expected {} or meta", name,
                   parameter.device().str(), runtime().device().str());
        seen.insert(parameter.unsafeGetTensorImpl());
        const auto dtypes = dtypes_of(parameter, options.mixed_precision);
        auto plan = std::find_if(plans.begin(), plans.end(), [&](const GroupPlan& p) {
          return p.dtypes == dtypes && p.trainable == parameter.requires_grad();
        });
        if (plan == plans.end()) plan = plans.insert(plans.end(), GroupPlan{dtypes, parameter.requires_grad(), {}});
        ParameterInfo info;
        info.name = name;
        info.module_index = static_cast<int>(m);
        info.parameter = parameter;
        info.sizes = parameter.sizes().vec();
        info.strides = parameter.is_non_overlapping_and_dense()
                           ? parameter.strides().vec()
                           : at::empty(parameter.sizes(), parameter.options().device(at::kMeta)).strides().vec();
        plan->parameters.push_back(std::move(info));
      }
      for (const auto& child : module.named_children())
        visit(*child.value(), path.empty() ? child.key() : path + "." + child.key());
    };
    visit(*modules[m], "");
  }

  const int index = static_cast<int>(units_.size());
  auto unit = std::make_shared<FsdpModule>(*this, index, modules, options);
  for (auto& plan : plans) {
    for (const auto& info : plan.parameters) owner_of_parameter_[info.parameter.unsafeGetTensorImpl()] = index;
    if (plan.trainable) unit->trainable_count_ += static_cast<int>(plan.parameters.size());
    unit->groups_.push_back(std::make_unique<FsdpParameterGroup>(
        *unit, sub_mesh, std::move(plan.parameters), plan.dtypes, plan.trainable, options_.sync_module_states));
    if (unit->groups_.back()->releasable()) {
      unit->releasable_ = true;
      unit->gathered_bytes_ += unit->groups_.back()->whole_bytes();
    }
  }
  for (const auto& module : modules) unit_of_module_[module.get()] = index;
  units_.push_back(unit);
  return *unit;
}

void Scheduler::build_tree() {
  const int count = static_cast<int>(units_.size());
  tree_.children.assign(count, {});
  parent_.assign(count, -1);
  for (int index = 0; index < count; ++index) {
    const std::function<void(torch::nn::Module&, bool)> visit = [&](torch::nn::Module& module, bool top) {
      const auto found = unit_of_module_.find(&module);
      if (!top && found != unit_of_module_.end() && found->second != index) {
        if (parent_[found->second] == -1) {
          parent_[found->second] = index;
          tree_.children[index].push_back(found->second);
        }
        return;
      }
      for (const auto& child : module.named_children()) visit(*child.value(), false);
    };
    for (const auto& module : units_[index]->modules_) visit(*module, true);
  }
  for (int index = 0; index < count; ++index) {
    if (parent_[index] == -1) tree_.roots.push_back(index);
  }
}

void Scheduler::name_units() {
  std::unordered_map<const torch::nn::Module*, std::string> paths;
  for (std::size_t r = 0; r < tree_.roots.size(); ++r) {
    const std::string prefix = r == 0 ? "" : fmt::format("#{}/", r);
    const std::function<void(torch::nn::Module&, const std::string&)> visit = [&](torch::nn::Module& module,
                                                                                  const std::string& path) {
      if (!paths.emplace(&module, path).second) return;
      for (const auto& child : module.named_children()) {
        const bool at_top = path.empty() || path == prefix;
        visit(*child.value(), at_top ? prefix + child.key() : path + "." + child.key());
      }
    };
    for (const auto& module : units_[tree_.roots[r]]->modules_) visit(*module, prefix);
  }
  for (auto& unit : units_) {
    std::vector<std::string> prefixes;
    std::string name;
    for (const auto& module : unit->modules_) {
      const std::string& path = paths.at(module.get());
      if (!name.empty()) name += "+";
      const bool root = path.empty() || path.ends_with("/");
      name += root ? path + "<root>" : path;
      prefixes.push_back(root ? path : path + ".");
    }
    unit->set_name(parent_[unit->index()] == -1 && unit->modules_.size() > 1
                       ? name.substr(0, name.find("<root>")) + "<root>"
                       : name);
    for (auto& group : unit->groups_) group->set_names(prefixes);
  }
}

void Scheduler::finalize() {
  if (finalized_) return;
  FSDP_CHECK(!units_.empty(), UsageError, "the context has no units: call fully_shard first");
  build_tree();
  name_units();
  forward_order_ = ::fsdp::forward_order(tree_);
  backward_order_ = ::fsdp::backward_order(tree_);
  std::vector<bool> owns(units_.size());
  for (std::size_t i = 0; i < units_.size(); ++i) owns[i] = !units_[i]->groups_.empty();
  for (int index : forward_order_) {
    if (!owns[index]) continue;
    if (first_owner_ < 0) first_owner_ = index;
    last_owner_ = index;
  }
  const auto kind = options_.prefetch.kind;
  const bool by_order = kind == Prefetch::Kind::depth || kind == Prefetch::Kind::recorded;
  prefetch_table_ = PrefetchTable(forward_order_, backward_order_, owns, by_order ? options_.prefetch.amount : 0);
  for (auto& [key, targets] : pending_lists_) prefetch_table_.set(key.first, key.second, std::move(targets));
  pending_lists_.clear();
  finalized_ = true;
  log_summary();
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

void Scheduler::log_summary() const {
  if (mesh_.world().rank() != Rank(0)) return;  // equal on all ranks
  std::int64_t parameters = 0, elements = 0;
  Bytes largest;
  std::set<std::string> strategies;
  for (const auto& unit : units_) {
    strategies.insert(unit->options().placements.name);
    largest = std::max(largest, unit->gathered_bytes());
    for (const auto& group : unit->groups()) {
      parameters += static_cast<std::int64_t>(group->parameters().size());
      for (const auto& p : group->parameters()) elements += p.parameter.numel();
    }
  }
  std::string names;
  for (const auto& strategy : strategies) names += (names.empty() ? "" : ", ") + strategy;
  log::write(log::Level::info,
             fmt::format("fsdp: {} units, {} parameters ({} elements), {} on mesh {} over {} ranks ({}); largest "
                         "gathered unit {:.1f} MiB; streams {}",
                         units_.size(), parameters, elements, names, mesh_.describe(), mesh_.world().size(),
                         mesh_.world().backend_name(), static_cast<double>(largest.value()) / (1024.0 * 1024.0),
                         options_.unify_communication_stream ? "unified" : "gather and reduce"));
  if (units_.size() == 1 && elements > 10'000'000) {
    log::write(log::Level::warning,
               "fsdp: the whole model is one unit, so nothing can overlap: make each block a unit before the root");
  }
}

}  // namespace fsdp
