#include "fsdp/data/mixture.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <queue>
#include <utility>

#include "fsdp/base/check.h"

namespace fsdp::data {
namespace {

constexpr std::uint64_t kWhole = std::uint64_t{1} << 32;  // weight of the root

}  // namespace

Mixture::Mixture(std::span<const double> weights) {
  FSDP_CHECK(!weights.empty() && weights.size() < kWhole / 2, UsageError, "a mixture of {} sources", weights.size());
  for (std::size_t i = 0; i < weights.size(); ++i) {
    FSDP_CHECK(std::isfinite(weights[i]) && weights[i] >= 0, UsageError, "weight {} is {}, expected a number from 0 up",
               i, weights[i]);
  }
  FSDP_CHECK(std::ranges::max(weights) > 0, UsageError, "all {} weights are 0: at least one must be more",
             weights.size());
  add_leaves(weights);
  join();
}

void Mixture::add_leaves(std::span<const double> weights) {
  const double largest = std::ranges::max(weights);  // divided by first: the sum of huge weights is not finite
  double total = 0;
  for (const auto weight : weights) total += weight / largest;
  auto left = static_cast<std::int64_t>(kWhole);
  for (const auto weight : weights) {
    const auto share = std::floor(weight / largest / total * static_cast<double>(kWhole));
    const auto whole = weight > 0 ? std::max<std::uint64_t>(1, static_cast<std::uint64_t>(share)) : 0;
    left -= static_cast<std::int64_t>(whole);
    nodes_.push_back({.weight = whole, .source = static_cast<std::int64_t>(nodes_.size())});
  }
  // The heaviest takes what rounding left over, or gives what it took too much.
  std::ranges::max_element(nodes_, {}, &Node::weight)->weight += static_cast<std::uint64_t>(left);
}

// As Huffman does, the two lightest at a time. A child that is nearly as heavy as its parent then has no such child
// itself, which keeps the errors of rounding, half a sample a level, from adding up.
void Mixture::join() {
  using Entry = std::pair<std::uint64_t, std::size_t>;  // weight, node: equal on every machine
  std::priority_queue<Entry, std::vector<Entry>, std::greater<>> lightest;
  for (std::size_t i = 0; i < nodes_.size(); ++i) {
    if (nodes_[i].weight > 0) lightest.emplace(nodes_[i].weight, i);
  }
  const auto take = [&] {
    const auto entry = lightest.top();
    lightest.pop();
    return entry;
  };
  while (lightest.size() > 1) {
    const auto [right_weight, right] = take();
    const auto [left_weight, left] = take();
    lightest.emplace(left_weight + right_weight, nodes_.size());
    nodes_.push_back({.weight = left_weight + right_weight, .left = left, .right = right});
  }
  if (nodes_.back().source >= 0) nodes_.push_back(nodes_[lightest.top().second]);  // one source has everything
}

Mixture::Sample Mixture::at(std::int64_t position) const {
  FSDP_CHECK(position >= 0, UsageError, "position {} of a mixture, expected 0 or more", position);
  auto number = static_cast<std::uint64_t>(position);
  const Node* node = &nodes_.back();
  while (node->source < 0) {
    const auto& left = nodes_[node->left];
    using Wide = unsigned __int128;
    const auto scaled = static_cast<Wide>(number) * left.weight + node->weight / 2;
    const auto to_left = static_cast<std::uint64_t>(scaled / node->weight);  // of those before
    const auto rest = static_cast<std::uint64_t>(scaled % node->weight);
    const bool goes_left = rest + left.weight >= node->weight;  // the next sample rounds to one more
    number = goes_left ? to_left : number - to_left;
    node = &nodes_[goes_left ? node->left : node->right];
  }
  return {node->source, static_cast<std::int64_t>(number)};
}

double Mixture::share(std::int64_t source) const {
  return static_cast<double>(nodes_.at(static_cast<std::size_t>(source)).weight) / static_cast<double>(kWhole);
}

}  // namespace fsdp::data
