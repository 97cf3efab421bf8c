#include "fsdp/layout/transition.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/base/error.h"
#include "fsdp/layout/global_layout.h"
#include "fsdp/layout/placement.h"

namespace fsdp {

void PrintTo(const RedistributionStep& step, std::ostream* out) {
  *out << to_string(step.transition) << "@" << step.axis;
}

}  // namespace fsdp

namespace fsdp::testing {
namespace {

using enum Placement;
using enum Transition;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Steps = std::vector<RedistributionStep>;

std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const UsageError& error) {
    return error.what();
  }
  return "accepted";
}

TEST(Transition, TableOfOneAxis) {
  EXPECT_EQ(plan_redistribution({flat}, {replicate}), (Steps{{0, all_gather}}));
  EXPECT_EQ(plan_redistribution({partial}, {replicate}), (Steps{{0, all_reduce}}));
  EXPECT_EQ(plan_redistribution({partial}, {flat}), (Steps{{0, reduce_scatter}}));
  EXPECT_EQ(plan_redistribution({replicate}, {flat}), (Steps{{0, slice}}));
  EXPECT_EQ(plan_redistribution({replicate}, {partial}), (Steps{{0, relabel}}));
  for (Placement same : {flat, replicate, partial}) EXPECT_TRUE(plan_redistribution({same}, {same}).empty());
  EXPECT_EQ(refusal([] { (void)plan_redistribution({flat}, {partial}); }),
            "cannot redistribute (flat) to (partial): axis 0 cannot go from flat to partial");
}

// "g0s1": gather axis 0, then slice axis 1; r reduce_scatter, a all_reduce, l relabel.
std::string code(const PlacementList& from, const PlacementList& to) {
  try {
    std::string text;
    for (const auto& step : plan_redistribution(from, to))
      text += std::string(1, "grasl"[static_cast<int>(step.transition)]) + std::to_string(step.axis);
    return text;
  } catch (const UsageError&) {
    return "refused";
  }
}

TEST(Transition, TableOfTwoAxes) {
  const PlacementList rr{replicate, replicate}, rp{replicate, partial}, rf{replicate, flat}, pr{partial, replicate},
      pp{partial, partial}, pf{partial, flat}, fr{flat, replicate}, fp{flat, partial}, ff{flat, flat};
  const std::vector<PlacementList> all = {rr, rp, rf, pr, pp, pf, fr, fp, ff};
  const std::string x = "refused";
  // clang-format off
  const std::vector<std::vector<std::string>> table = {
      //             rr      rp      rf      pr      pp      pf      fr      fp      ff
      /* rr */ {"", "l1", "s1", "l0", "l1l0", "s1l0", "s0", "s0l1", "s1s0"},
      /* rp */ {"a1", "", "r1", "a1l0", "l0", "r1l0", "s0a1", "s0", "r1s0"},
      /* rf */ {"g1", x, "", "l0g1", x, "l0", x, x, "s0"},
      /* pr */ {"a0", "a0l1", "s1a0", "", "l1", "s1", "r0", "r0l1", "s1r0"},
      /* pp */ {"a1a0", "a0", "r1a0", "a1", "", "r1", "r0a1", "r0", "r1r0"},
      /* pf */ {"a0g1", x, "a0", "g1", x, "", x, x, "r0"},
      /* fr */ {"g0", "l1g0", x, x, x, x, "", "l1", x},
      /* fp */ {"a1g0", "g0", x, x, x, x, "a1", "", x},
      /* ff */ {"g0g1", x, "g0", x, x, x, x, x, ""},
  };
  // clang-format on
  for (std::size_t i = 0; i < all.size(); ++i) {
    for (std::size_t j = 0; j < all.size(); ++j)
      EXPECT_EQ(code(all[i], all[j]), table[i][j]) << to_string(all[i]) << " to " << to_string(all[j]);
  }
}

TEST(Transition, RefusalsNameBothPlacementsAndTheAxes) {
  EXPECT_EQ(refusal([] {
              (void)plan_redistribution({flat}, {flat, flat});
            }),
            "cannot redistribute (flat) to (flat, flat): the numbers of axes differ");
  EXPECT_EQ(refusal([] {
              (void)plan_redistribution({flat, partial}, {flat, flat});
            }),
            "cannot redistribute (flat, partial) to (flat, flat): axis 1 would be split after the finer axis 0; put it "
            "first or gather that one");
  EXPECT_EQ(refusal([] {
              (void)plan_redistribution({flat, flat}, {flat, replicate});
            }),
            "cannot redistribute (flat, flat) to (flat, replicate): axis 1 cannot be gathered while the finer axis 0 "
            "stays flat");
  EXPECT_EQ(refusal([] {
              (void)plan_redistribution({replicate, flat}, {replicate, partial});
            }),
            "cannot redistribute (replicate, flat) to (replicate, partial): axis 1 cannot go from flat to partial");
}

// ---- Proof by simulation: every rank's piece, carried through the planned steps one contiguous copy at a time. Shards
// end at multiples of the alignment, so one value stands for one aligned block of elements.

struct Piece {
  ElementRange range;  // in blocks
  std::vector<double> values;
};

class Ranks {
 public:
  explicit Ranks(std::vector<int> sizes) : sizes_(std::move(sizes)) {
    count_ = std::accumulate(sizes_.begin(), sizes_.end(), 1, std::multiplies<>());
    layout_ = GlobalLayout(std::vector<std::int64_t>{1, 300}, count_);
  }

  [[nodiscard]] std::vector<int> coordinates(int rank) const {
    std::vector<int> c(sizes_.size());
    for (std::size_t axis = sizes_.size(); axis-- > 0; rank /= sizes_[axis]) c[axis] = rank % sizes_[axis];
    return c;
  }
  [[nodiscard]] ElementRange shard(const PlacementList& placements, int rank) const {
    const ElementRange elements = layout_.shard(placements, sizes_, coordinates(rank));
    return {elements.begin / GlobalLayout::kAlignment, elements.end / GlobalLayout::kAlignment};
  }

  // What the ranks hold so that the true value of element i is truth(i): random parts that sum to it on partial axes.
  [[nodiscard]] std::vector<Piece> contents(const PlacementList& placements) const {
    std::vector<Piece> pieces(count_);
    for (int rank = 0; rank < count_; ++rank) {
      const auto c = coordinates(rank);
      Piece& piece = pieces[rank];
      piece.range = shard(placements, rank);
      bool rest = true;  // the rank at 0 on every partial axis holds what the others leave
      std::int64_t others = 1;
      for (std::size_t axis = 0; axis < sizes_.size(); ++axis) {
        if (placements[axis] != partial) continue;
        rest = rest && c[axis] == 0;
        others *= sizes_[axis];
      }
      for (auto i = piece.range.begin; i < piece.range.end; ++i) {
        // Parts depend on the element only, so replicas agree.
        const double part = static_cast<double>(i % 7) + 1;
        piece.values.push_back(rest ? truth(i) - static_cast<double>(others - 1) * part : part);
      }
    }
    return pieces;
  }

  // The meaning of a set of pieces: sum over partial axes, equal on replicate axes. Empty text when right.
  [[nodiscard]] std::string check(const PlacementList& placements, const std::vector<Piece>& pieces) const {
    std::map<std::vector<int>, std::map<std::int64_t, double>> sums;  // [coordinates with partial axes at -1][element]
    for (int rank = 0; rank < count_; ++rank) {
      if (!(pieces[rank].range == shard(placements, rank)))
        return "rank " + std::to_string(rank) + " holds another range";
      auto key = coordinates(rank);
      for (std::size_t axis = 0; axis < key.size(); ++axis) {
        if (placements[axis] == partial) key[axis] = -1;
      }
      auto element = pieces[rank].range.begin;
      for (double value : pieces[rank].values) sums[key][element++] += value;
    }
    for (const auto& [key, elements] : sums) {
      for (const auto& [element, value] : elements) {
        if (value != truth(element)) return "element " + std::to_string(element) + " is " + std::to_string(value);
      }
    }
    return "";
  }

  // One step; `placements` are those before it and become those after it.
  void run(const RedistributionStep& step, PlacementList& placements, Placement target,
           std::vector<Piece>& pieces) const {
    std::vector<Piece> next(count_);
    placements[step.axis] = target;
    for (int rank = 0; rank < count_; ++rank) {
      const auto me = coordinates(rank)[step.axis];
      std::vector<int> peers;  // [coordinate on the axis]
      for (int other = 0; other < count_; ++other) {
        auto a = coordinates(other), b = coordinates(rank);
        a[step.axis] = b[step.axis] = 0;
        if (a == b) peers.push_back(other);
      }
      const auto sum = [&](std::int64_t offset, std::int64_t length) {
        std::vector<double> values(length);
        for (int peer : peers) {
          for (std::int64_t i = 0; i < length; ++i) values[i] += pieces[peer].values[offset + i];
        }
        return values;
      };
      next[rank].range = shard(placements, rank);
      const auto share = next[rank].range.length();
      switch (step.transition) {
        case all_gather:
          for (int peer : peers)
            next[rank].values.insert(next[rank].values.end(), pieces[peer].values.begin(), pieces[peer].values.end());
          break;
        case reduce_scatter:
          next[rank].values = sum(me * share, share);
          break;
        case all_reduce:
          next[rank].values = sum(0, share);
          break;
        case slice:
          next[rank].values.assign(pieces[rank].values.begin() + me * share,
                                   pieces[rank].values.begin() + (me + 1) * share);
          break;
        case relabel:
          next[rank].values = pieces[rank].values;
          if (me != 0) next[rank].values.assign(share, 0.0);
          break;
      }
    }
    pieces = std::move(next);
  }

 private:
  static double truth(std::int64_t element) { return static_cast<double>(element * 3 + 1000); }

  std::vector<int> sizes_;
  int count_ = 0;
  GlobalLayout layout_;
};

std::vector<PlacementList> all_placements(std::size_t axes) {
  std::vector<PlacementList> lists = {{}};
  for (std::size_t axis = 0; axis < axes; ++axis) {
    std::vector<PlacementList> longer;
    for (const auto& list : lists) {
      for (Placement placement : {replicate, partial, flat}) {
        longer.push_back(list);
        longer.back().push_back(placement);
      }
    }
    lists = std::move(longer);
  }
  return lists;
}

void prove(const std::vector<int>& sizes, int& legal) {
  const Ranks ranks(sizes);
  for (const auto& from : all_placements(sizes.size())) {
    for (const auto& to : all_placements(sizes.size())) {
      Steps steps;
      try {
        steps = plan_redistribution(from, to);
      } catch (const UsageError&) {
        continue;
      }
      ++legal;
      auto pieces = ranks.contents(from);
      ASSERT_EQ(ranks.check(from, pieces), "") << "the simulation itself is wrong";
      PlacementList placements = from;
      for (const auto& step : steps) ranks.run(step, placements, to[step.axis], pieces);
      ASSERT_EQ(placements, to);
      ASSERT_EQ(ranks.check(to, pieces), "")
          << to_string(from) << " to " << to_string(to) << " by " << ::testing::PrintToString(steps);
    }
  }
}

TEST(Transition, EveryPlanOfUpToThreeAxesMovesTheRightData) {
  int legal = 0;
  for (int a = 1; a <= 3; ++a) {
    prove({a}, legal);
    for (int b = 1; b <= 3; ++b) {
      prove({a, b}, legal);
      for (int c = 1; c <= 3; ++c) prove({a, b, c}, legal);
    }
  }
  EXPECT_EQ(legal, 3 * 8 + 9 * 57 + 27 * 382) << "plans newly refused or newly allowed";
}

TEST(Transition, SplitsRunFromTheLastAxisAndGathersFromTheFirst) {
  EXPECT_THAT(plan_redistribution({partial, partial, partial}, {flat, flat, flat}),
              ElementsAre(RedistributionStep{2, reduce_scatter}, RedistributionStep{1, reduce_scatter},
                          RedistributionStep{0, reduce_scatter}));
  EXPECT_THAT(plan_redistribution({flat, flat, flat}, {replicate, replicate, replicate}),
              ElementsAre(RedistributionStep{0, all_gather}, RedistributionStep{1, all_gather},
                          RedistributionStep{2, all_gather}));
  EXPECT_THAT(plan_redistribution({partial, partial, partial}, {replicate, flat, replicate}),
              ElementsAre(RedistributionStep{1, reduce_scatter}, RedistributionStep{2, all_reduce},
                          RedistributionStep{0, all_reduce}))
      << "all-reduces run on the smaller data";
}

TEST(Strategy, PresetsAreValidAndRestWhereTheirNamesSay) {
  struct Row {
    Strategy strategy;
    PlacementList parameter, gradient, optimizer;
  };
  const std::vector<Row> rows = {
      {ddp("dp"), {replicate}, {partial}, {replicate}},
      {zero1("dp"), {replicate}, {partial}, {flat}},
      {zero2("dp"), {replicate}, {flat}, {flat}},
      {zero3("dp"), {flat}, {flat}, {flat}},
      {hsdp("outer", "inner"), {replicate, flat}, {partial, flat}, {replicate, flat}},
      {hfsdp("outer", "inner"), {replicate, flat}, {partial, flat}, {flat, flat}},
      {zero3({"a", "b"}), {flat, flat}, {flat, flat}, {flat, flat}},
      {zero1({"a", "b", "c"}), {replicate, replicate, replicate}, {partial, partial, partial}, {flat, flat, flat}},
  };
  for (const auto& row : rows) {
    SCOPED_TRACE(row.strategy.name);
    EXPECT_NO_THROW(row.strategy.validate());
    EXPECT_EQ(row.strategy.parameter, row.parameter);
    EXPECT_EQ(row.strategy.gradient, row.gradient);
    EXPECT_EQ(row.strategy.optimizer, row.optimizer);
  }
  EXPECT_THAT(hsdp("outer", "inner").axes, ElementsAre("outer", "inner"));
  EXPECT_EQ(hfsdp("outer", "inner").name, "hfsdp");
}

TEST(Strategy, RefusesListsThatDoNotFitTheAxes) {
  EXPECT_EQ(refusal([] { Strategy{"s", {}, {}, {}, {}}.validate(); }), "strategy \"s\" names no mesh axis");
  EXPECT_EQ(refusal([] { zero3({"a", "b", "a"}).validate(); }), "strategy \"zero3\" names mesh axis \"a\" twice");
  EXPECT_EQ(refusal([] {
              Strategy{"s", {"a", "b"}, {flat, flat}, {flat}, {flat, flat}}.validate();
            }),
            "strategy \"s\": expected 2 gradient placements (one per axis), got 1");
}

TEST(Strategy, RefusesPlacementsThatMakeNoSense) {
  EXPECT_EQ(refusal([] {
              Strategy{"s", {"a"}, {partial}, {flat}, {flat}}.validate();
            }),
            "strategy \"s\": the parameter cannot be partial on axis \"a\"");
  EXPECT_EQ(refusal([] {
              Strategy{"s", {"a"}, {flat}, {replicate}, {flat}}.validate();
            }),
            "strategy \"s\": the gradient cannot be replicate on axis \"a\"");
  EXPECT_EQ(refusal([] {
              Strategy{"s", {"a"}, {flat}, {flat}, {partial}}.validate();
            }),
            "strategy \"s\": the optimizer cannot be partial on axis \"a\"");
}

TEST(Strategy, RefusesChangesThatNoContiguousPiecesCanMake) {
  // The outer axis alone flat under a flat inner optimizer: the gradient would be split again, coarser after finer.
  EXPECT_THAT(refusal([] {
                Strategy{"s", {"a", "b"}, {replicate, flat}, {flat, partial}, {flat, flat}}.validate();
              }),
              HasSubstr("cannot redistribute (flat, partial) to (flat, flat)"));
  // Compute weights flat on the outer axis only.
  EXPECT_THAT(refusal([] {
                Strategy{"s", {"a", "b"}, {flat, replicate}, {flat, flat}, {flat, flat}}.validate();
              }),
              HasSubstr("cannot redistribute (flat, flat) to (flat, replicate)"));
}

TEST(Placement, ReadsAsText) {
  EXPECT_EQ(to_string(PlacementList{replicate, partial, flat}), "(replicate, partial, flat)");
  EXPECT_EQ(to_string(PlacementList{}), "()");
}

}  // namespace
}  // namespace fsdp::testing
