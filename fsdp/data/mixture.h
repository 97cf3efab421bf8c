// Which source a sample of a mixture comes from, and which of that source's samples it is.
//
// The sources are the leaves of a binary tree. Of the first n samples that reach a node with weight W, n * Wl / W
// rounded to the nearest go to its left child of weight Wl: so any position is found by one division a level, without a
// table, and no source is ever more than 2 samples off its share. A pure function of weights and position.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace fsdp::data {

class Mixture {
 public:
  // Weights of any scale, 0 leaves a source out. Throws UsageError for weights that are negative, not finite or all 0.
  explicit Mixture(std::span<const double> weights);

  struct Sample {
    std::int64_t source = 0;
    std::int64_t number = 0;  // how many samples of that source come before
    bool operator==(const Sample&) const = default;
  };
  [[nodiscard]] Sample at(std::int64_t position) const;

  // Of the whole, as it is used: a multiple of 2^-32, never 0 for a positive weight.
  [[nodiscard]] double share(std::int64_t source) const;

 private:
  struct Node {
    std::uint64_t weight = 0;  // of all sources below
    std::int64_t source = -1;  // of a leaf
    std::size_t left = 0, right = 0;
  };

  void add_leaves(std::span<const double> weights);
  void join();  // makes the inner nodes

  std::vector<Node> nodes_;  // first a leaf for every source, the root is the last
};

}  // namespace fsdp::data
