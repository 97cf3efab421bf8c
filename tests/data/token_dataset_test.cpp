#include "fsdp/data/token_dataset.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <set>

#include "fsdp/data/indexed_writer.h"
#include "tests/data/temporary_folder.h"

namespace fsdp::testing {
namespace {

using data::IndexedWriter;
using data::kIgnoredTarget;
using data::TokenBatch;
using data::TokenDataset;
using data::TokenDatasetOptions;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Tokens = std::vector<std::int64_t>;

class TokenDatasetTest : public TemporaryFolder {
 protected:
  // Documents of these lengths; the tokens are first, first + 1, ...: a token tells where it was.
  std::string counting(const std::string& name, const std::vector<std::int64_t>& lengths,
                       std::int64_t first = 0) const {
    IndexedWriter writer(path(name), {.vocabulary = 1 << 20});
    for (const auto length : lengths) {
      Tokens tokens(static_cast<std::size_t>(length));
      std::iota(tokens.begin(), tokens.end(), first);
      first += length;
      writer.append_document(tokens);
    }
    writer.finish();
    return path(name);
  }
  static std::string refuse(const std::vector<std::string>& files, const TokenDatasetOptions& options) {
    return refusal([&] { TokenDataset dataset(files, options); });
  }
  // Of one source: the held-out tokens begin here.
  static std::int64_t split_of(const std::string& file, std::int64_t context, double fraction) {
    return TokenDataset({file}, {.context = context, .validation_fraction = fraction, .vocabulary = 1 << 20})
        .train_tokens();
  }

  static constexpr std::int64_t kVocabulary = 1 << 20;
};

TEST_F(TokenDatasetTest, TargetsAreTheNextTokens) {
  const TokenDataset data({counting("a", {5000})}, {.context = 8, .vocabulary = kVocabulary});
  const auto batch = data.train_batch(0, 50);
  EXPECT_FALSE(data.bytes_only());
  EXPECT_EQ(batch.sequences, 50);
  EXPECT_EQ(batch.context, 8);
  ASSERT_EQ(batch.tokens.size(), 400u);
  ASSERT_EQ(batch.targets.size(), 400u);
  for (std::size_t i = 0; i < 400; ++i) {
    EXPECT_EQ(batch.targets[i], batch.tokens[i] + 1);
    if (i % 8 != 0) {
      EXPECT_EQ(batch.tokens[i], batch.tokens[i - 1] + 1);
    }
  }
}

TEST_F(TokenDatasetTest, BytesAreTokens) {
  const TokenDataset data({write("a", std::string(95, 'a') + "bcde\xff")}, {.context = 4});
  EXPECT_THAT(data.train_batch(0, 20).tokens, Each('a'));
  const auto last = data.validation_batch(0, 1, 1);
  EXPECT_THAT(last.tokens, ElementsAre('b', 'c', 'd', 'e'));
  EXPECT_THAT(last.targets, ElementsAre('c', 'd', 'e', 255));
  EXPECT_TRUE(data.bytes_only());
}

TEST_F(TokenDatasetTest, EveryTokenIsATargetOnceAnEpoch) {
  for (const std::int64_t length : {40, 41, 43, 47, 48, 100, 237}) {
    const auto name = "a" + std::to_string(length);
    const TokenDataset data({counting(name, {length})},
                            {.context = 6, .validation_fraction = 0.2, .seed = 9, .vocabulary = kVocabulary});
    const auto windows = (data.train_tokens() - 1) / 6, slack = (data.train_tokens() - 1) % 6;
    std::set<std::int64_t> firsts;
    for (std::int64_t epoch = 0; epoch < 60; ++epoch) {
      auto targets = data.train_batch(epoch * windows, windows).targets;
      std::ranges::sort(targets);
      const auto first = targets.front();
      firsts.insert(first);
      EXPECT_TRUE(first >= 1 && first <= 1 + slack);
      for (std::size_t i = 0; i < targets.size(); ++i)
        ASSERT_EQ(targets[i], first + static_cast<std::int64_t>(i)) << length << " epoch " << epoch;
    }
    EXPECT_EQ(static_cast<std::int64_t>(firsts.size()), slack + 1) << "every tail is trained on in some epoch";
  }
}

TEST_F(TokenDatasetTest, EpochsSeedsAndSourcesAreShuffledDifferently) {
  const auto a = counting("a", {2001}), b = counting("b", {2001});
  const TokenDatasetOptions options{.context = 10, .validation_fraction = 0.5, .vocabulary = kVocabulary};
  const TokenDataset one({a}, options);
  auto other_seed = options;
  other_seed.seed = 1;
  const TokenDataset seeded({a}, other_seed);
  ASSERT_EQ(one.train_tokens(), 1000);
  constexpr std::int64_t kWindows = 99;
  const auto first = one.train_batch(0, kWindows).tokens;
  EXPECT_EQ(first, TokenDataset({a}, options).train_batch(0, kWindows).tokens);
  EXPECT_NE(first, one.train_batch(kWindows, kWindows).tokens);
  EXPECT_NE(first, seeded.train_batch(0, kWindows).tokens);
  EXPECT_FALSE(std::ranges::is_sorted(first));
  // Two equal files take turns; the orders within them differ.
  const auto both = TokenDataset({a, b}, options).train_batch(0, 2 * kWindows).tokens;
  Tokens even, odd;
  for (std::size_t i = 0; i < both.size(); ++i) (i / 10 % 2 == 0 ? even : odd).push_back(both[i]);
  EXPECT_NE(even, odd);
}

TEST_F(TokenDatasetTest, OrderDoesNotDependOnHowItIsSplit) {
  const std::vector<std::string> files = {counting("a", {700, 300, 5}), counting("b", {900}, 5000)};
  const TokenDatasetOptions options{
      .context = 8, .seed = 3, .vocabulary = kVocabulary, .weights = {0.3, 0.7}, .mask_document_starts = true};
  const TokenDataset data(files, options);
  const auto whole = data.train_batch(1000, 24);
  for (const std::int64_t parts : {2, 3, 4, 6, 24}) {
    Tokens tokens, targets;
    std::int64_t counted = 0;
    for (std::int64_t part = 0; part < parts; ++part) {
      const TokenDataset again(files, options);  // as another rank, or after a restart
      const auto first = 1000 + part * (24 / parts);
      const auto piece = again.train_batch(first, 24 / parts);
      tokens.insert(tokens.end(), piece.tokens.begin(), piece.tokens.end());
      targets.insert(targets.end(), piece.targets.begin(), piece.targets.end());
      counted += again.count_targets(first, 24 / parts);
    }
    EXPECT_EQ(tokens, whole.tokens) << parts;
    EXPECT_EQ(targets, whole.targets) << parts;
    EXPECT_EQ(counted, data.count_targets(1000, 24));
  }
}

// What is trained on must never change by accident: a resumed run would see other data.
TEST_F(TokenDatasetTest, TheOrderIsTheOneOfEarlierVersions) {
  const TokenDataset data({counting("a", {500}), counting("b", {300}, 1000)},
                          {.context = 10, .seed = 7, .vocabulary = kVocabulary, .weights = {2, 1}});
  Tokens firsts;
  for (std::int64_t position = 0; position < 12; ++position)
    firsts.push_back(data.train_batch(position, 1).tokens.front());
  EXPECT_THAT(firsts, ElementsAre(191, 1260, 451, 11, 1170, 91, 391, 1090, 241, 441, 1070, 171));
}

TEST_F(TokenDatasetTest, FilesAreMixedByWeight) {
  const std::vector<std::string> files = {counting("a", {400}), counting("b", {4000}, 10'000)};
  const auto share_of_a = [&](const std::vector<double>& weights) {
    const TokenDataset data(files, {.context = 4, .vocabulary = kVocabulary, .weights = weights});
    const auto tokens = data.train_batch(0, 1100).tokens;
    return static_cast<double>(std::ranges::count_if(tokens, [](auto token) { return token < 10'000; })) / 4400;
  };
  EXPECT_NEAR(share_of_a({}), 1.0 / 11, 0.001);  // as the files are long
  EXPECT_NEAR(share_of_a({1, 1}), 0.5, 0.001);
  EXPECT_NEAR(share_of_a({30, 10}), 0.75, 0.001);
  EXPECT_EQ(share_of_a({0, 1}), 0);
}

TEST_F(TokenDatasetTest, AFileIsSplitBetweenDocumentsNearTheFraction) {
  EXPECT_EQ(split_of(counting("one", {1000}), 8, 0.1), 900);
  EXPECT_EQ(split_of(counting("above", {500, 420, 80}), 8, 0.1), 920);
  EXPECT_EQ(split_of(counting("below", {500, 390, 110}), 8, 0.1), 890);
  EXPECT_EQ(split_of(counting("nearer", {880, 30, 90}), 8, 0.1), 910);
  EXPECT_EQ(split_of(counting("exact", {900, 100}), 8, 0.1), 900);
  EXPECT_EQ(split_of(counting("equal", {890, 20, 90}), 8, 0.1), 890);  // equally near: rather more held out
  EXPECT_EQ(split_of(counting("empty", {890, 0, 0, 110, 0}), 8, 0.1), 890);
  // Neither half as much as was asked for nor twice: then inside a document.
  EXPECT_EQ(split_of(counting("far", {500, 500}), 8, 0.1), 900);
  EXPECT_EQ(split_of(counting("tiny", {960, 40}), 8, 0.1), 900);
  EXPECT_EQ(split_of(counting("border", {800, 200}), 8, 0.1), 800);
  // Not where a part would hold no sequence.
  EXPECT_EQ(split_of(counting("short", {915, 78, 7}), 60, 0.07), 915);
  EXPECT_EQ(split_of(counting("early", {30, 70}), 35, 0.6), 40);
  EXPECT_EQ(split_of(counting("none", {960, 40}), 60, 0.07), 929);
}

TEST_F(TokenDatasetTest, WhatIsHeldOutIsNeverTrainedOn) {
  const TokenDataset data({counting("a", {300, 37})},
                          {.context = 5, .validation_fraction = 0.1, .vocabulary = kVocabulary});
  ASSERT_EQ(data.train_tokens(), 300);
  EXPECT_EQ(data.validation_tokens(), 37);
  EXPECT_LT(std::ranges::max(data.train_batch(0, 2000).targets), 300);
  const auto held_out = data.validation_batch(0, 9, 9);
  EXPECT_EQ(held_out.tokens.front(), 300);
  EXPECT_EQ(held_out.targets.back(), 336);
  std::vector<std::int64_t> starts;
  for (std::size_t i = 0; i < 9; ++i) starts.push_back(held_out.tokens[5 * i] - 300);
  EXPECT_THAT(starts, ElementsAre(0, 3, 7, 11, 15, 19, 23, 27, 31));
}

TEST_F(TokenDatasetTest, ValidationLiesEvenlyOverAllFiles) {
  const std::vector<std::string> files = {counting("a", {1000}), counting("b", {3000}, 10'000),
                                          counting("c", {1000}, 20'000)};
  const TokenDataset data(files, {.context = 4, .validation_fraction = 0.1, .vocabulary = kVocabulary});
  for (const std::int64_t total : {1, 2, 5, 20, 100, 1000}) {
    const auto whole = data.validation_batch(0, total, total);
    Tokens joined;
    for (std::int64_t first = 0; first < total; ++first) {
      const auto one = data.validation_batch(first, 1, total);
      joined.insert(joined.end(), one.tokens.begin(), one.tokens.end());
    }
    EXPECT_EQ(joined, whole.tokens);
    std::map<std::int64_t, std::int64_t> counts;
    for (std::int64_t i = 0; i < total; ++i) ++counts[whole.tokens[static_cast<std::size_t>(4 * i)] / 10'000];
    for (std::int64_t file = 0; file < 3; ++file)
      EXPECT_NEAR(static_cast<double>(counts[file]), static_cast<double>(total) * (file == 1 ? 0.6 : 0.2), 1);
    EXPECT_TRUE(std::ranges::is_sorted(whole.tokens) || total > 100);  // windows overlap when there are many
  }
  EXPECT_THAT(refusal([&] { (void)data.validation_batch(3, 2, 4); }),
              HasSubstr("2 validation sequences from 3 on were asked for, out of 4"));
}

TEST_F(TokenDatasetTest, FirstTokensOfDocumentsAreNoTargetsWhenMasked) {
  const std::vector<std::int64_t> lengths = {7, 0, 1, 1, 0, 0, 30, 2, 90, 3, 400, 5};
  const auto file = counting("a", lengths);
  std::set<std::int64_t> starts;
  std::int64_t next = 0;
  for (const auto length : lengths) starts.insert(std::exchange(next, next + length));
  const TokenDatasetOptions plain{.context = 6, .validation_fraction = 0.3, .vocabulary = kVocabulary};
  auto masked = plain;
  masked.mask_document_starts = true;
  const TokenDataset with({file}, masked), without({file}, plain);
  const auto check = [&](const TokenBatch& batch, const TokenBatch& whole) {
    std::int64_t ignored = 0;
    ASSERT_EQ(batch.tokens, whole.tokens);
    for (std::size_t i = 0; i < batch.targets.size(); ++i) {
      const auto expected = starts.contains(whole.targets[i]) ? kIgnoredTarget : whole.targets[i];
      ASSERT_EQ(batch.targets[i], expected) << "after token " << batch.tokens[i];
      ignored += expected == kIgnoredTarget ? 1 : 0;
    }
    EXPECT_GT(ignored, 0);
  };
  check(with.train_batch(0, 300), without.train_batch(0, 300));
  check(with.validation_batch(0, 100, 100), without.validation_batch(0, 100, 100));
  for (std::int64_t position = 0; position < 300; ++position) {
    const auto targets = with.train_batch(position, 1).targets;
    ASSERT_EQ(with.count_targets(position, 1), 6 - std::ranges::count(targets, kIgnoredTarget));
  }
  EXPECT_EQ(without.count_targets(0, 300), 1800);
}

TEST_F(TokenDatasetTest, FilesAndOptionsThatCannotServeAreNamed) {
  const auto a = counting("a", {1000});
  const TokenDatasetOptions good{.context = 8, .vocabulary = kVocabulary};
  EXPECT_EQ(refuse({a}, good), "no error");
  EXPECT_THAT(refuse({}, good), HasSubstr("expected at least one file of tokens"));
  EXPECT_THAT(refuse({a, path("none")}, good), HasSubstr("none does not exist"));
  EXPECT_THAT(
      refuse({write("short", "abc")}, good),
      HasSubstr("short: 2 of 3 tokens are for training, but one sequence needs context + 1 = 9; give more text"));
  EXPECT_THAT(refuse({write("brief", std::string(100, 'a'))}, good),
              HasSubstr("brief: 5 of 100 tokens are for validation"));
  const auto with = [&](auto change) {
    auto options = good;
    change(options);
    return refuse({a}, options);
  };
  EXPECT_THAT(with([](auto& o) { o.context = 0; }), HasSubstr("a context of 0 tokens"));
  EXPECT_THAT(with([](auto& o) { o.validation_fraction = 0; }), HasSubstr("a validation fraction of 0"));
  EXPECT_THAT(with([](auto& o) { o.validation_fraction = 1; }), HasSubstr("a validation fraction of 1"));
  EXPECT_THAT(with([](auto& o) { o.weights = {1, 2}; }), HasSubstr("expected one weight a file: 2 for 1 files"));
  EXPECT_THAT(with([](auto& o) { o.weights = {-1}; }), HasSubstr("weight 0 is -1"));
  EXPECT_THAT(with([](auto& o) { o.vocabulary = 0; }), HasSubstr("a vocabulary of 0"));
  const TokenDataset small({a}, {.context = 8, .vocabulary = 100});
  EXPECT_THAT(refusal([&] { (void)small.validation_batch(0, 1, 1); }),
              HasSubstr("a.bin: token 950 at position 950 (byte offset 3800) is beyond the vocabulary of 100"));
  EXPECT_THAT(refusal([&] { (void)small.train_batch(0, -1); }), HasSubstr("a batch of -1 sequences"));
  EXPECT_THAT(refusal([&] { (void)small.train_batch(-1, 1); }), HasSubstr("position -1"));
}

TEST_F(TokenDatasetTest, SaysWhatItHolds) {
  const TokenDataset data({counting("a", {900, 100}), write("b", std::string(200, 'x'))},
                          {.context = 8, .validation_fraction = 0.1, .vocabulary = kVocabulary, .weights = {3, 1}});
  EXPECT_EQ(
      data.describe(),
      "2 files of tokens: 1080 for training, 120 held out\n  " + path("a") +
          ": indexed pair of int32, 2 documents, 900 tokens for training, 100 held out, share 75 % (weight 3)\n  " +
          path("b") + ": bytes of uint8, 1 document, 180 tokens for training, 20 held out, share 25 % (weight 1)");
}

}  // namespace
}  // namespace fsdp::testing
