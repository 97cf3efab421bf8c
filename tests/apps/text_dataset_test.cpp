#include "apps/fsdp/text_dataset.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "fsdp/base/error.h"

namespace fsdp::app {
namespace {

using ::testing::HasSubstr;

class TextDatasetTest : public ::testing::Test {
 protected:
  TextDatasetTest() : folder_(std::filesystem::path(::testing::TempDir()) / ("text_" + std::to_string(::getpid()))) {
    std::filesystem::create_directories(folder_);
  }
  ~TextDatasetTest() override { std::filesystem::remove_all(folder_); }

  std::string write(const std::string& name, const std::string& text) {
    const auto path = folder_ / name;
    std::ofstream(path) << text;
    return path.string();
  }
  static std::string alphabet(int size) {
    std::string text;
    for (int i = 0; i < size; ++i) text += static_cast<char>('a' + i % 26);
    return text;
  }
  static std::string refusal(const std::vector<std::string>& files,
                             const TextDatasetOptions& options = {.context = 8}) {
    try {
      TextDataset dataset(files, options);
    } catch (const UsageError& error) {
      return error.what();
    }
    return "no error";
  }

  std::filesystem::path folder_;
};

TEST_F(TextDatasetTest, TargetsAreTheNextBytes) {
  const TextDataset data({write("a", alphabet(260) + "\xff")}, {.context = 8, .validation_fraction = 0.1});
  for (std::int64_t step = 0; step < 50; ++step) {
    const auto batch = data.train_batch(step, 0, 4);
    EXPECT_EQ(batch.tokens.sizes(), (std::vector<std::int64_t>{4, 8}));
    EXPECT_TRUE(at::equal(batch.tokens.narrow(1, 1, 7), batch.targets.narrow(1, 0, 7)));
  }
  const auto last = data.validation_batch(3, 1, 4);
  EXPECT_EQ(last.targets[0][7].item<std::int64_t>(),
            255);  // the last held-out byte is reached, and is no negative number
}

TEST_F(TextDatasetTest, OrderDoesNotDependOnHowAStepIsSplit) {
  const TextDataset data({write("a", alphabet(1000))}, {.context = 8, .seed = 3});
  const auto whole = data.train_batch(7, 0, 12);
  for (const std::int64_t parts : {2, 3, 4, 6, 12}) {
    std::vector<at::Tensor> pieces;
    for (std::int64_t part = 0; part < parts; ++part)
      pieces.push_back(data.train_batch(7, part * (12 / parts), 12 / parts).tokens);
    EXPECT_TRUE(at::equal(at::cat(pieces), whole.tokens)) << parts;
  }
}

TEST_F(TextDatasetTest, StepsAndSeedsDiffer) {
  const auto file = write("a", alphabet(10000));
  const TextDataset data({file}, {.context = 8, .seed = 3});
  const TextDataset other({file}, {.context = 8, .seed = 4});
  EXPECT_TRUE(at::equal(data.train_batch(0, 0, 8).tokens, data.train_batch(0, 0, 8).tokens));
  EXPECT_FALSE(at::equal(data.train_batch(0, 0, 8).tokens, data.train_batch(1, 0, 8).tokens));
  EXPECT_FALSE(at::equal(data.train_batch(0, 0, 8).tokens, other.train_batch(0, 0, 8).tokens));
}

TEST_F(TextDatasetTest, TheLastBytesAreHeldOut) {
  const TextDataset data({write("a", std::string(300, 'a')), write("b", std::string(100, 'b'))},
                         {.context = 8, .validation_fraction = 0.25});
  EXPECT_EQ(data.train_text(), std::string(300, 'a'));
  EXPECT_EQ(data.validation_text(), std::string(100, 'b'));
  EXPECT_EQ(data.train_batch(0, 0, 64).targets.max().item<std::int64_t>(), 'a');
  EXPECT_EQ(data.validation_batch(0, 64, 64).tokens.min().item<std::int64_t>(), 'b');
}

TEST_F(TextDatasetTest, FilesThatCannotServeAreNamed) {
  EXPECT_THAT(refusal({(folder_ / "none").string()}), HasSubstr("none does not exist"));
  EXPECT_THAT(refusal({folder_.string()}), HasSubstr("is not a file"));
  EXPECT_THAT(refusal({write("empty", "")}), HasSubstr("empty is empty"));
  EXPECT_THAT(refusal({write("short", "abc")}), HasSubstr("one sequence needs run.context + 1 = 9"));
  EXPECT_THAT(refusal({write("a", alphabet(100))}), HasSubstr("are for validation"));  // 5 of 100 bytes
}

}  // namespace
}  // namespace fsdp::app
