// The part of Scheduler that says at the start what was built, and what of it will not work well.
#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "fsdp/base/log.h"
#include "fsdp/layout/transition.h"
#include "fsdp/module/scheduler.h"

namespace fsdp {
namespace {

std::string scaled(Bytes bytes) {
  const auto value = static_cast<double>(bytes.value());
  if (value < 1024 * 1024) return fmt::format("{:.1f} KiB", value / 1024);
  if (value < 1024.0 * 1024 * 1024) return fmt::format("{:.1f} MiB", value / (1024 * 1024));
  return fmt::format("{:.2f} GiB", value / (1024.0 * 1024 * 1024));
}

// "all_gather over dp"
std::string path_of(const PlacementList& from, const PlacementList& to, const Strategy& strategy) {
  std::string text;
  for (const auto& step : plan_redistribution(from, to)) {
    if (step.transition == Transition::slice || step.transition == Transition::relabel) continue;
    text += fmt::format("{}{} over {}", text.empty() ? "" : ", ", to_string(step.transition), strategy.axes[step.axis]);
  }
  return text.empty() ? "none" : text;
}

// What moves for a unit of this strategy.
std::string collectives_of(const Strategy& strategy) {
  const PlacementList whole(strategy.axes.size(), Placement::replicate),
      partial(strategy.axes.size(), Placement::partial);
  const std::string first = path_of(partial, strategy.gradient, strategy);
  const std::string last = path_of(strategy.gradient, strategy.optimizer, strategy);
  std::string reduce = first == "none" ? last : first;
  if (first != "none" && last != "none") reduce += ", then " + last;
  const std::string refresh = path_of(strategy.optimizer, strategy.parameter, strategy);
  return fmt::format("gather {}{}, reduce {}{}", path_of(strategy.parameter, whole, strategy),
                     refresh == "none" ? "" : " (once a step " + refresh + ")", reduce,
                     first != "none" && last == "none" ? "" : " on the last microbatch");
}

std::string prefetch_of(const Prefetch& prefetch) {
  switch (prefetch.kind) {
    case Prefetch::Kind::none:
      return "none";
    case Prefetch::Kind::depth:
      return fmt::format("depth {}", prefetch.amount);
    case Prefetch::Kind::lists:
      return "lists";
    case Prefetch::Kind::recorded:
      return fmt::format("recorded, {} ahead", prefetch.amount);
    case Prefetch::Kind::delayed_release:
      return fmt::format("delayed release of {}", prefetch.amount);
  }
  return "?";
}

}  // namespace

void Scheduler::log_summary() const {
  if (mesh_.world().rank() != Rank(0)) return;  // equal on all ranks
  std::int64_t parameters = 0, elements = 0, frozen = 0, buffers = 0;
  Bytes largest, smallest = Bytes(std::numeric_limits<std::int64_t>::max()), buffer_bytes;
  std::string largest_name;
  bool partitioned = false;
  std::vector<std::pair<std::string, std::string>> strategies;  // name, collectives
  for (const auto& unit : units_) {
    const auto& strategy = unit->options().placements;
    const std::pair<std::string, std::string> plan{strategy.name, collectives_of(strategy)};
    if (std::find(strategies.begin(), strategies.end(), plan) == strategies.end()) strategies.push_back(plan);
    partitioned |= !unit->options().partitioned_axes.empty();
    Bytes whole;
    for (const auto& group : unit->groups()) {
      whole += group->whole_bytes();
      parameters += static_cast<std::int64_t>(group->parameters().size());
      for (const auto& p : group->parameters()) {
        elements += p.parameter.numel();
        frozen += p.parameter.requires_grad() ? 0 : p.parameter.numel();
      }
    }
    if (!unit->groups().empty()) smallest = std::min(smallest, whole);
    if (whole > largest) {
      largest = whole;
      largest_name = unit->name();
    }
    for (const auto& buffer : unit->buffers_) {
      ++buffers;
      buffer_bytes += Bytes(static_cast<std::int64_t>(buffer.tensor.nbytes()));
    }
  }
  std::string how;
  for (const auto& [name, collectives] : strategies)
    how += fmt::format("{}{}: {}", how.empty() ? "" : "; ", name, collectives);
  log::write(
      log::Level::info,
      fmt::format("fsdp: {} units, {} parameters of {} elements{} ({} frozen), {} buffers of {}; on mesh {} over {} "
                  "ranks by {}{}; {}; a unit takes {} to {} gathered (largest {}); prefetch {}, reductions {}, {}",
                  units_.size(), parameters, elements, partitioned ? " on this rank" : "", frozen, buffers,
                  scaled(buffer_bytes), mesh_.describe(), mesh_.world().size(), mesh_.world().backend_name(),
                  memory_path_.empty() ? "" : " (" + memory_path_ + ")", how, scaled(std::min(smallest, largest)),
                  scaled(largest), largest_name, prefetch_of(options_.prefetch),
                  options_.reduction.delay > 0 ? fmt::format("delayed by {}", options_.reduction.delay)
                                               : std::string("immediate"),
                  options_.unify_communication_stream ? "one communication stream"
                                                      : "gathers and reductions on streams of their own"));
}

void Scheduler::warn_of_poor_units() const {
  if (mesh_.world().rank() != Rank(0)) return;
  constexpr std::int64_t kSmallModel = 1'000'000;  // elements; below, nobody minds
  std::int64_t total = 0;
  for (const auto& unit : units_) {
    for (const auto& group : unit->groups()) {
      if (group->releasable()) total += group->layout().padded_size().value();
    }
  }
  if (total < kSmallModel) return;
  for (const auto& unit : units_) {
    std::int64_t elements = 0;
    for (const auto& group : unit->groups()) {
      if (group->releasable()) elements += group->layout().padded_size().value();
    }
    const double share = 100.0 * static_cast<double>(elements) / static_cast<double>(total);
    if (units_.size() > 1 && share <= 50) continue;
    log::write(
        log::Level::warning,
        fmt::format("fsdp: unit \"{}\" holds {:.0f} % of all sharded weights ({} of {} elements): all of them are in "
                    "memory while it computes, and its gather and reduction have little to hide behind. Make the "
                    "blocks inside it units before it",
                    unit->name(), share, elements, total));
  }
}

}  // namespace fsdp
