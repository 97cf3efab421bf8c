#include "fsdp/layout/placement.h"

#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/layout/transition.h"

namespace fsdp {

const char* to_string(Placement placement) {
  switch (placement) {
    case Placement::replicate:
      return "replicate";
    case Placement::partial:
      return "partial";
    case Placement::flat:
      return "flat";
  }
  return "?";
}

std::string to_string(const PlacementList& placements) {
  std::string text = "(";
  for (std::size_t i = 0; i < placements.size(); ++i) text += (i ? ", " : "") + std::string(to_string(placements[i]));
  return text + ")";
}

void Strategy::validate() const {
  FSDP_CHECK(!axes.empty(), UsageError, "strategy \"{}\" names no mesh axis", name);
  for (std::size_t i = 0; i < axes.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      FSDP_CHECK(axes[i] != axes[j], UsageError, "strategy \"{}\" names mesh axis \"{}\" twice", name, axes[i]);
    }
  }
  const auto check_list = [&](const char* what, const PlacementList& list, Placement refused) {
    FSDP_CHECK(list.size() == axes.size(), UsageError,
               "strategy \"{}\": expected {} {} placements (one per axis), got {}", name, axes.size(), what,
               list.size());
    for (std::size_t i = 0; i < list.size(); ++i) {
      FSDP_CHECK(list[i] != refused, UsageError, "strategy \"{}\": the {} cannot be {} on axis \"{}\"", name, what,
                 to_string(refused), axes[i]);
    }
  };
  check_list("parameter", parameter, Placement::partial);
  check_list("gradient", gradient, Placement::replicate);
  check_list("optimizer", optimizer, Placement::partial);
  for (std::size_t i = 0; i < axes.size(); ++i) {
    for (const auto& [what, list] : {std::pair{"parameter", &parameter}, std::pair{"gradient", &gradient}}) {
      FSDP_CHECK((*list)[i] != Placement::flat || optimizer[i] == Placement::flat, UsageError,
                 "strategy \"{}\": the {} is flat on axis \"{}\" where the optimizer is {}; what is flat for the {} "
                 "must be flat for the optimizer",
                 name, what, axes[i], to_string(optimizer[i]), what);
    }
  }
  // Each of these throws when the data cannot take the step: gradients into the optimizer's placement, main weights
  // into the compute placement, compute weights into whole ones.
  (void)plan_redistribution(PlacementList(axes.size(), Placement::partial), gradient);
  (void)plan_redistribution(gradient, optimizer);
  (void)plan_redistribution(optimizer, parameter);
  (void)plan_redistribution(parameter, PlacementList(axes.size(), Placement::replicate));
}

namespace {

Strategy uniform(std::string name, std::vector<std::string> axes, Placement parameter, Placement gradient,
                 Placement optimizer) {
  const auto n = axes.size();
  return {std::move(name), std::move(axes), PlacementList(n, parameter), PlacementList(n, gradient),
          PlacementList(n, optimizer)};
}

}  // namespace

using enum Placement;

Strategy ddp(std::vector<std::string> axes) { return uniform("ddp", std::move(axes), replicate, partial, replicate); }
Strategy zero1(std::vector<std::string> axes) { return uniform("zero1", std::move(axes), replicate, partial, flat); }
Strategy zero2(std::vector<std::string> axes) { return uniform("zero2", std::move(axes), replicate, flat, flat); }
Strategy zero3(std::vector<std::string> axes) { return uniform("zero3", std::move(axes), flat, flat, flat); }

Strategy hsdp(std::string outer, std::string inner) {
  return {"hsdp", {std::move(outer), std::move(inner)}, {replicate, flat}, {partial, flat}, {replicate, flat}};
}

Strategy hfsdp(std::string outer, std::string inner) {
  return {"hfsdp", {std::move(outer), std::move(inner)}, {replicate, flat}, {partial, flat}, {flat, flat}};
}

}  // namespace fsdp
