#include "fsdp/module/unit_order.h"

#include <algorithm>

namespace fsdp {
namespace {

void walk(const UnitTree& tree, int unit, bool reversed, std::vector<int>& order) {
  order.push_back(unit);
  auto children = tree.children[unit];
  if (reversed) std::reverse(children.begin(), children.end());
  for (int child : children) walk(tree, child, reversed, order);
}

std::vector<int> walk_all(const UnitTree& tree, bool reversed) {
  std::vector<int> order;
  auto roots = tree.roots;
  if (reversed) std::reverse(roots.begin(), roots.end());
  for (int root : roots) walk(tree, root, reversed, order);
  return order;
}

}  // namespace

std::vector<int> forward_order(const UnitTree& tree) { return walk_all(tree, false); }
std::vector<int> backward_order(const UnitTree& tree) { return walk_all(tree, true); }

}  // namespace fsdp
