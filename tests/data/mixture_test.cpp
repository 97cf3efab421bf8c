#include "fsdp/data/mixture.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "tests/data/temporary_folder.h"

namespace fsdp::testing {
namespace {

using data::Mixture;
using ::testing::HasSubstr;
using Weights = std::vector<double>;

const std::vector<Weights> kWeights = {{1},
                                       {1, 1},
                                       {0.7, 0.3},
                                       {0.7, 0.2, 0.1},
                                       {5, 0, 3},
                                       {1e-12, 1},
                                       {1e300, 1e300},
                                       {1e-300, 2e-300},
                                       {0, 1},
                                       {1, 2, 3, 4, 5, 6, 7, 8, 9, 10},
                                       {0.999, 0.001},
                                       {1, 1, 1},
                                       {0.5, 0.25, 0.125, 0.125}};

// Those, and some drawn at random over many magnitudes.
std::vector<Weights> many_weights() {
  auto all = kWeights;
  std::mt19937 random(1);
  for (int i = 0; i < 60; ++i) {
    Weights weights(2 + random() % 12);
    for (auto& weight : weights) weight = std::pow(10.0, -(random() % 1000 / 250.0));
    all.push_back(weights);
  }
  return all;
}

TEST(Mixture, NumbersCountWhatCameBefore) {
  for (const auto& weights : many_weights()) {
    const Mixture mixture(weights);
    std::vector<std::int64_t> counts(weights.size());
    for (std::int64_t position = 0; position < 3000; ++position) {
      const auto [source, number] = mixture.at(position);
      ASSERT_EQ(number, counts[static_cast<std::size_t>(source)]++) << position;
    }
  }
}

TEST(Mixture, TwoSourcesTakeTurnsAsTheirWeights) {
  const auto order = [](const Weights& weights) {
    std::string text;
    for (std::int64_t p = 0; p < 12; ++p) text += static_cast<char>('a' + Mixture(weights).at(p).source);
    return text;
  };
  EXPECT_EQ(order({3, 1}), "aabaaabaaaba");
  EXPECT_EQ(order({1, 2}), "babbabbabbab");
  EXPECT_EQ(order({1, 0}), "aaaaaaaaaaaa");
}

TEST(Mixture, SharesHoldAtEveryPrefix) {
  double worst = 0, worst_of_two = 0;
  for (const auto& weights : many_weights()) {
    const Mixture mixture(weights);
    std::vector<std::int64_t> counts(weights.size());
    for (std::int64_t position = 0; position < 20'000; ++position) {
      ++counts[static_cast<std::size_t>(mixture.at(position).source)];
      for (std::size_t s = 0; s < weights.size(); ++s) {
        const auto share = mixture.share(static_cast<std::int64_t>(s));
        const auto off = std::abs(static_cast<double>(counts[s]) - static_cast<double>(position + 1) * share);
        auto& bound = weights.size() == 2 ? worst_of_two : worst;
        bound = std::max(bound, off);
      }
    }
  }
  EXPECT_LE(worst_of_two, 0.5);
  EXPECT_LT(worst, 2);
  RecordProperty("worst", std::to_string(worst));
}

TEST(Mixture, SharesAreTheWeights) {
  for (const auto& weights : many_weights()) {
    const Mixture mixture(weights);
    const auto largest = *std::max_element(weights.begin(), weights.end());
    double total = 0;
    for (const auto weight : weights) total += weight / largest;
    for (std::size_t s = 0; s < weights.size(); ++s) {
      EXPECT_NEAR(mixture.share(static_cast<std::int64_t>(s)), weights[s] / largest / total,
                  static_cast<double>(weights.size()) * 0x1p-32);
    }
  }
}

TEST(Mixture, LatePositionsContinueEarlierOnes) {
  const Mixture mixture(Weights{0.6, 0.3, 0.1});
  const std::int64_t turn = std::int64_t{1} << 32;
  for (const std::int64_t start :
       {turn - 500, 3 * turn - 500, std::int64_t{1} << 50, std::numeric_limits<std::int64_t>::max() - 1000}) {
    std::vector<std::int64_t> next(3, -1);
    for (std::int64_t position = start; position < start + 1000; ++position) {
      const auto [source, number] = mixture.at(position);
      auto& expected = next[static_cast<std::size_t>(source)];
      if (expected >= 0) {
        ASSERT_EQ(number, expected) << position;
      }
      expected = number + 1;
    }
    EXPECT_EQ(next[0] + next[1] + next[2], start + 1000);
    for (std::size_t s = 0; s < 3; ++s) {
      const auto expected = mixture.share(static_cast<std::int64_t>(s)) * static_cast<double>(start);
      EXPECT_NEAR(static_cast<double>(next[s]) / expected, 1, 1e-6);
    }
  }
}

TEST(Mixture, ASourceOfOneHasEveryPosition) {
  const Mixture mixture(Weights{0, 3, 0});
  for (const std::int64_t position : {std::int64_t{0}, std::int64_t{12345}, std::numeric_limits<std::int64_t>::max()})
    EXPECT_EQ(mixture.at(position), (Mixture::Sample{1, position}));
}

TEST(Mixture, EveryPositiveWeightHasAShare) {
  Weights weights(1000, 1e-30);
  weights[500] = 1;
  const Mixture mixture(weights);
  double total = 0;
  for (std::int64_t s = 0; s < 1000; ++s) {
    EXPECT_GT(mixture.share(s), 0) << s;
    total += mixture.share(s);
  }
  EXPECT_DOUBLE_EQ(total, 1);
  EXPECT_EQ(Mixture(Weights{1, 0}).share(1), 0);
  EXPECT_DOUBLE_EQ(Mixture(Weights{3, 1}).share(0), 0.75);
}

TEST(Mixture, WeightsThatMakeNoSenseAreRefused) {
  const auto refused = [](const Weights& weights) { return refusal([&] { Mixture mixture(weights); }); };
  EXPECT_THAT(refused({}), HasSubstr("a mixture of 0 sources"));
  EXPECT_THAT(refused({1, -0.5}), HasSubstr("weight 1 is -0.5, expected a number from 0 up"));
  EXPECT_THAT(refused({std::nan(""), 1}), HasSubstr("weight 0 is nan"));
  EXPECT_THAT(refused({1, std::numeric_limits<double>::infinity()}), HasSubstr("weight 1 is inf"));
  EXPECT_THAT(refused({0, 0}), HasSubstr("all 2 weights are 0"));
  EXPECT_THAT(refusal([] { (void)Mixture(Weights{1}).at(-1); }), HasSubstr("position -1 of a mixture"));
}

}  // namespace
}  // namespace fsdp::testing
