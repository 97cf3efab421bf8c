// The part of Scheduler that ends construction: the tree of units, their names and orders.
#include <algorithm>
#include <functional>

#include "fsdp/base/check.h"
#include "fsdp/module/scheduler.h"

namespace fsdp {

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
    for (auto& buffer : unit->buffers_) buffer.name = prefixes[buffer.module_index] + buffer.name;
  }
  for (std::size_t r = 0; r < tree_.roots.size(); ++r) {  // every path, also of modules that are registered twice
    const std::string prefix = r == 0 ? "" : fmt::format("#{}/", r);
    for (const auto& module : units_[tree_.roots[r]]->modules_) {
      for (const auto& item : module->named_parameters()) {
        if (item.value().defined()) parameter_names_.emplace(prefix + item.key(), item.value().unsafeGetTensorImpl());
      }
    }
  }
}

Scheduler::OwnedParameter Scheduler::find_parameter(const std::string& name) const {
  const auto found = parameter_names_.find(name);
  FSDP_CHECK(found != parameter_names_.end(), UsageError,
             "the context has no parameter \"{}\" (names are module paths from the root, such as \"layers.0.weight\")",
             name);
  return owners_.at(found->second);
}

void Scheduler::verify_parameters() const {
  for (const auto& unit : units_) {
    for (const auto& top : unit->modules_) {
      const std::function<void(torch::nn::Module&, const std::string&)> visit = [&](torch::nn::Module& module,
                                                                                    const std::string& path) {
        const auto found = unit_of_module_.find(&module);
        if (found != unit_of_module_.end() && found->second != unit->index()) return;
        for (const auto& item : module.named_parameters(/*recurse=*/false)) {
          FSDP_CHECK(
              !item.value().defined() || owners_.contains(item.value().unsafeGetTensorImpl()), UsageError,
              "parameter \"{}\" of unit \"{}\" is not the tensor that was sharded: it was added, replaced or tied "
              "after fully_shard. Do that before, and load values in place into context->parameters()",
              path.empty() ? item.key() : path + "." + item.key(), unit->name());
        }
        for (const auto& child : module.named_children())
          visit(*child.value(), path.empty() ? child.key() : path + "." + child.key());
      };
      visit(*top, "");
    }
  }
}

void Scheduler::finalize() {
  if (finalized_) return;
  FSDP_CHECK(!units_.empty(), UsageError, "the context has no units: call fully_shard first");
  verify_parameters();
  build_tree();
  if (options_.skipped_units == SkippedUnits::participate) {
    const auto kind = options_.prefetch.kind;
    FSDP_CHECK(kind == Prefetch::Kind::none || kind == Prefetch::Kind::depth, UsageError,
               "SkippedUnits::participate follows the static orders: it needs Prefetch::none() or Prefetch::depth(k)");
    FSDP_CHECK(tree_.roots.size() == 1, UsageError,
               "SkippedUnits::participate needs one root unit, and there are {}: make the whole model a unit",
               tree_.roots.size());
  }
  name_units();
  forward_order_ = ::fsdp::forward_order(tree_);
  backward_order_ = ::fsdp::backward_order(tree_);
  for (Phase phase : {Phase::forward, Phase::backward}) {
    const auto& order = phase == Phase::forward ? forward_order_ : backward_order_;
    auto& position = position_[static_cast<int>(phase)];
    position.resize(order.size());
    for (std::size_t p = 0; p < order.size(); ++p) position[order[p]] = static_cast<int>(p);
  }
  std::vector<bool> owns(units_.size());
  for (std::size_t i = 0; i < units_.size(); ++i) owns[i] = !units_[i]->groups_.empty() || !units_[i]->lenders_.empty();
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
  former_memory_.clear();
  finalized_ = true;
  make_peer_memory();
  make_inboxes();
  make_arena();
  log_summary();
  warn_of_poor_units();
}

}  // namespace fsdp
