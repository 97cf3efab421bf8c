// Each way in which a config can be wrong ends in a message that names the key, what is expected and what came.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>

#include "apps/fsdp/config_check.h"
#include "apps/fsdp/config_reader.h"
#include "apps/fsdp/config_table.h"
#include "apps/fsdp/edit_distance.h"
#include "apps/fsdp/memory_check.h"
#include "apps/fsdp/rank_errors.h"
#include "fsdp/base/error.h"

namespace fsdp::app {
namespace {

using ::testing::HasSubstr;

class ConfigTest : public ::testing::Test {
 protected:
  ConfigTest()
      : path_(std::filesystem::path(::testing::TempDir()) / ("config_" + std::to_string(::getpid()) + ".toml")) {}
  ~ConfigTest() override { std::filesystem::remove(path_); }

  TrainConfig read(const std::string& text, std::vector<std::string> settings = {}, std::optional<int> ranks = {}) {
    std::ofstream(path_) << text;
    return read_train_config({path_, std::move(settings), ranks});
  }
  // The message of the refusal.
  std::string refusal(const std::string& text, std::vector<std::string> settings = {}, std::optional<int> ranks = {}) {
    return message([&] { validate_train_config(read(text, std::move(settings), ranks)); });
  }
  static std::string message(const std::function<void()>& action) {
    try {
      action();
    } catch (const UsageError& error) {
      return error.what();
    }
    return "no error";
  }
  std::string at_line(int line) const { return path_.string() + ":" + std::to_string(line); }

  std::filesystem::path path_;
};

const std::string kData = "data.files = [\"text\"]\n";

TEST_F(ConfigTest, DefaultsPresetAndOverrides) {
  const auto config = read(kData + "[model]\nwidth = 96\npreset = \"small\"\n[optimizer]\nlearning_rate = 1\n");
  EXPECT_EQ(config.model.shape.layers, 4);         // of the preset
  EXPECT_EQ(config.model.shape.width, 96);         // of the file, although it stands before the preset
  EXPECT_EQ(config.optimizer.learning_rate, 1.0);  // a whole number is a number
  EXPECT_EQ(config.run.steps, RunConfig{}.steps);
  EXPECT_EQ(config.data.files, TextList{"text"});
}

TEST_F(ConfigTest, SettingsWinOverTheFile) {
  const auto config = read(kData + "run.steps = 7\n",
                           {"run.steps=9", "parallel.strategy=zero2", "data.files=[\"a\", \"b\"]",
                            "run.sample_prompt=In = it", "parallel.keep_last=false"},
                           3);
  EXPECT_EQ(config.run.steps, 9);
  EXPECT_EQ(config.run.ranks, 3);
  EXPECT_EQ(config.parallel.strategy, "zero2");
  EXPECT_EQ(config.data.files, (TextList{"a", "b"}));
  EXPECT_EQ(config.run.sample_prompt, "In = it");
  EXPECT_FALSE(config.parallel.keep_last);
}

TEST_F(ConfigTest, EveryFieldTakesItsOwnDefault) {
  TrainConfig config = read(kData);
  for (const Field& field : config_fields()) {
    const Value value = std::visit([&](auto accessor) { return Value(accessor(config)); }, field.target);
    EXPECT_NO_THROW(assign(field, config, value, "test")) << field.key;
    EXPECT_FALSE(field.meaning.empty()) << field.key;
  }
}

TEST_F(ConfigTest, WeightsAreNumbersOfEitherKind) {
  EXPECT_EQ(read(kData + "data.weights = [1, 2.5]\n").data.weights, (NumberList{1, 2.5}));
  EXPECT_EQ(read(kData + "data.weights = []\n").data.weights, NumberList{});
  EXPECT_EQ(read(kData, {"data.weights=[3]"}).data.weights, NumberList{3});
  EXPECT_THAT(refusal(kData + "data.weights = [\"a\"]\n"), HasSubstr("data.weights: expected a list of numbers"));
  EXPECT_THAT(refusal(kData + "data.weights = [1, \"a\"]\n"), HasSubstr("data.weights: expected a list of numbers"));
  EXPECT_THAT(refusal(kData + "data.weights = [true]\n"), HasSubstr("data.weights: expected a list of numbers"));
  EXPECT_THAT(refusal("data.files = [1]\n"), HasSubstr("data.files: expected a list of texts"));
}

TEST_F(ConfigTest, WhatIsPrintedReadsBackAsTheSame) {
  for (const std::string preset : {"tiny", "8B"}) {
    const auto config = read(kData, {"model.preset=" + preset, "model.width=128", "data.weights=[0.25, 3]",
                                     "run.sample_prompt='quote \" backslash \\ tab\t'", "optimizer.learning_rate=1",
                                     "mesh.axes=[\"a=1\", \"b=2\"]", "parallel.keep_last=false",
                                     "optimizer.weight_decay=1e-7", "run.seed=9000000000000000"});
    const auto printed = to_toml(config);
    const auto again = read(printed);
    for (const Field& field : config_fields()) {
      const auto value = [&](TrainConfig c) {
        return std::visit([&](auto accessor) { return Value(accessor(c)); }, field.target);
      };
      EXPECT_EQ(value(again), value(config)) << field.key;
    }
    EXPECT_EQ(to_toml(again), printed);
  }
}

TEST_F(ConfigTest, EveryFieldIsExplained) {
  const auto text = describe_fields();
  for (const Field& field : config_fields()) {
    EXPECT_THAT(text, HasSubstr("  " + std::string(field.key.substr(field.key.find('.') + 1)) + " "));
    EXPECT_THAT(text, HasSubstr(std::string(field.meaning)));
    EXPECT_THAT(text, HasSubstr(expectation(field)));
  }
  EXPECT_THAT(text, HasSubstr("[optimizer]\n"));
  EXPECT_THAT(text, HasSubstr("an integer from 1 to 1000000000; default 100"));
  EXPECT_THAT(text, HasSubstr("a list of texts; required"));
}

TEST_F(ConfigTest, TheShippedConfigsAreValid) {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(FSDP_CONFIGS)) {
    std::string problem;
    try {
      validate_train_config(read_train_config({entry.path()}));
    } catch (const UsageError& error) {
      problem = error.what();
    }
    EXPECT_EQ(problem, "") << entry.path();
    ++count;
  }
  EXPECT_GE(count, 7);
}

TEST_F(ConfigTest, MemoryFollowsTheStrategy) {
  auto config = read(kData, {"model.preset=1B"}, 4);
  const auto parameters = config.model.shape.parameter_count();
  const auto bytes = [&](const char* strategy) {
    config.parallel.strategy = strategy;
    return resting_bytes(config);
  };
  EXPECT_EQ(bytes("ddp"), 16 * parameters);
  EXPECT_EQ(bytes("zero1"), 8 * parameters + 2 * parameters);
  EXPECT_EQ(bytes("zero2"), 4 * parameters + parameters + 2 * parameters);
  EXPECT_EQ(bytes("zero3"), 4 * parameters);
  config.mesh.axes = {"outer=2", "inner=2"};
  EXPECT_EQ(bytes("hsdp"), 8 * parameters);
  EXPECT_EQ(bytes("hfsdp"), 4 * parameters);
  EXPECT_EQ(message([&] { check_memory(read(kData), 1); }), "no error");
  EXPECT_THAT(message([&] {
                check_memory(read(kData, {"model.preset=8B", "model.layers=10000"}), 1);
              }),
              HasSubstr("take a smaller model, more machines or a strategy that shards more"));
}

TEST(RankErrors, AreToldOnceWithTheRanksTheyConcern) {
  EXPECT_EQ(merge_errors({"", "", ""}), "");
  EXPECT_EQ(merge_errors({"no file", "no file"}), "no file");
  EXPECT_EQ(merge_errors({"", "no file", ""}), "on rank 1: no file");
  EXPECT_EQ(merge_errors({"", "no file", "no file", "no key"}), "on ranks 1, 2: no file; on rank 3: no key");
}

TEST(RankErrors, DifferencesNameBothSides) {
  EXPECT_EQ(describe_differences({"a = 1\nb = 2\n", "a = 1\nb = 2\n"}), "");
  EXPECT_EQ(describe_differences({"a = 1\nb = 2\n", "a = 1\nb = 2\n", "a = 1\nb = 3\n"}),
            "the ranks were started with different settings or data: b = 2 on rank 0, b = 3 on rank 2");
}

TEST_F(ConfigTest, UnknownKeysAreRefusedWithTheNearestOne) {
  EXPECT_THAT(refusal(kData + "[model]\nlayer = 2\n"),
              HasSubstr(at_line(3) + ": unknown key model.layer; the nearest is model.layers"));
  EXPECT_THAT(refusal(kData + "[modle]\n"), HasSubstr(at_line(2) + ": unknown key modle"));
  EXPECT_THAT(refusal(kData, {"run.stepz=2"}), HasSubstr("--set: unknown key run.stepz; the nearest is run.steps"));
}

TEST_F(ConfigTest, WrongTypesAreRefused) {
  EXPECT_THAT(refusal(kData + "run.steps = \"ten\"\n"),
              HasSubstr(at_line(2) + ": run.steps: expected an integer from 1 to"));
  EXPECT_THAT(refusal(kData + "run.steps = 1.5\n"),
              HasSubstr("run.steps: expected an integer from 1 to 1000000000, got 1.5"));
  EXPECT_THAT(refusal(kData + "parallel.keep_last = 1\n"),
              HasSubstr("parallel.keep_last: expected true or false, got 1"));
  EXPECT_THAT(refusal("data.files = \"text\"\n"), HasSubstr("data.files: expected a list of texts, got \"text\""));
  EXPECT_THAT(refusal(kData + "run = 1\n"), HasSubstr("unknown key run"));
  EXPECT_THAT(refusal(kData, {"run.steps=ten"}), HasSubstr("--set: run.steps: expected an integer"));
  EXPECT_THAT(refusal(kData, {"run.steps"}), HasSubstr("--set: expected key=value, got \"run.steps\""));
}

TEST_F(ConfigTest, ValuesOutOfRangeAreRefused) {
  EXPECT_THAT(refusal(kData + "run.steps = 0\n"),
              HasSubstr("run.steps: expected an integer from 1 to 1000000000, got 0"));
  EXPECT_THAT(refusal(kData + "optimizer.learning_rate = nan\n"),
              HasSubstr("optimizer.learning_rate: expected a number from 0 to 1000, got nan"));
  EXPECT_THAT(refusal(kData + "parallel.strategy = \"zero4\"\n"),
              HasSubstr("parallel.strategy: expected one of ddp, zero1, zero2, zero3, hsdp, hfsdp, got \"zero4\""));
  EXPECT_THAT(
      refusal(kData + "model.preset = \"9B\"\n"),
      HasSubstr("model.preset: expected one of tiny, small, 160M, 1B, 8B, tiny-moe, deepseek-proxy, got \"9B\""));
  EXPECT_THAT(refusal(kData, {}, 0), HasSubstr("--ranks: run.ranks: expected an integer from 1 to 256, got 0"));
}

TEST_F(ConfigTest, MissingAndMalformedFilesAreRefused) {
  EXPECT_THAT(refusal("run.steps = 1\n"), HasSubstr("data.files is missing; expected a list of texts"));
  EXPECT_THAT(refusal(kData + "[run\n"), HasSubstr(at_line(2)));
  EXPECT_THAT(message([] { static_cast<void>(read_train_config({"/no/such.toml"})); }),
              HasSubstr("/no/such.toml: no such config file"));
}

TEST_F(ConfigTest, ImpossibleCombinationsAreRefused) {
  EXPECT_THAT(refusal(kData + "run.batch = 8\nrun.ranks = 3\n"),
              HasSubstr("run.batch: expected a multiple of ranks x microbatches = 3 x 1 = 3, got 8"));
  EXPECT_THAT(refusal(kData + "model.heads = 5\n"),
              HasSubstr("model.heads: expected a divisor of model.width 64, got 5"));
  EXPECT_THAT(refusal(kData + "model.kv_heads = 3\n"),
              HasSubstr("model.kv_heads: expected a divisor of model.heads 4, got 3"));
  EXPECT_THAT(refusal(kData + "model.width = 12\n"),
              HasSubstr("the head width (model.width / model.heads) must be even, got 12 / 4 = 3"));
  EXPECT_THAT(refusal(kData + "run.context = 4096\n"),
              HasSubstr("run.context: expected at most model.max_context = 512, got 4096"));
  EXPECT_THAT(refusal(kData + "mesh.axes = [\"dp=4\"]\nrun.ranks = 2\n"),
              HasSubstr("mesh.axes make 4 ranks, but there are 2"));
  EXPECT_THAT(refusal(kData + "mesh.axes = [\"dp\"]\n"),
              HasSubstr("mesh.axes: expected entries like \"dp=2\" with a size of at least 1, got \"dp\""));
  EXPECT_THAT(refusal(kData + "mesh.axes = [\"a=1\", \"a=1\"]\n"), HasSubstr("mesh.axes: the axis a is named twice"));
  EXPECT_THAT(refusal(kData + "parallel.strategy = \"hsdp\"\nrun.ranks = 4\n"),
              HasSubstr("parallel.strategy hsdp needs a mesh of two axes"));
  EXPECT_THAT(refusal(kData + "run.steps = 5\noptimizer.warmup_steps = 6\n"),
              HasSubstr("optimizer.warmup_steps: expected at most run.steps = 5, got 6"));
  EXPECT_THAT(refusal("data.files = []\n"), HasSubstr("data.files: expected at least one file"));
  EXPECT_THAT(refusal(kData + "data.weights = [1, 2]\n"),
              HasSubstr("data.weights: expected one number a file, 1 for data.files, got 2"));
}

TEST_F(ConfigTest, MixturesOfExperts) {
  const std::string moe = kData + "model.preset = \"tiny-moe\"\nrun.ranks = 4\n";
  const auto config = read(moe + "parallel.expert_ranks = 2\nmodel.top_k = 1\n");
  EXPECT_EQ(config.model.moe.experts, 4);
  EXPECT_EQ(config.model.moe.top_k, 1);
  const auto axes = mesh_axes(config);
  ASSERT_EQ(axes.size(), 2U);
  EXPECT_EQ(axes[0].name + axes[1].name, "edpep");
  EXPECT_EQ(axes[0].size * 10 + axes[1].size, 22);
  EXPECT_GT(parameter_count(config), moe_config(config).active_parameter_count());
  EXPECT_EQ(read(kData).model.moe.experts, 0);

  EXPECT_THAT(refusal(moe + "parallel.expert_ranks = 3\nmodel.experts = 6\n"),
              HasSubstr("parallel.expert_ranks: expected a divisor of the 4 ranks, got 3"));
  EXPECT_THAT(refusal(moe + "parallel.expert_ranks = 4\nmodel.experts = 6\n"),
              HasSubstr("parallel.expert_ranks: expected a divisor of model.experts = 6, got 4"));
  EXPECT_THAT(refusal(moe + "model.top_k = 5\n"), HasSubstr("model.top_k: expected 1 to model.experts = 4, got 5"));
  EXPECT_THAT(refusal(moe + "model.dense_layers = 3\n"),
              HasSubstr("model.dense_layers: expected 0 to model.layers = 2, got 3"));
  EXPECT_THAT(refusal(moe + "model.dense_layers = 2\n"), HasSubstr("expected fewer than model.layers = 2, got 2"));
  EXPECT_THAT(refusal(moe + "parallel.reshard = \"never\"\n"), HasSubstr("parallel.reshard: not with a mixture"));
  EXPECT_THAT(refusal(moe + "parallel.prefetch = \"recorded\"\n"), HasSubstr("expected depth or none"));
  EXPECT_THAT(refusal(kData + "parallel.expert_ranks = 2\nrun.ranks = 2\n"),
              HasSubstr("parallel.expert_ranks is of mixtures of experts, but model.experts is 0"));
  EXPECT_THAT(refusal(kData + "model.top_k = 3\n"), HasSubstr("model.top_k is of mixtures of experts"));
  EXPECT_THAT(refusal(moe + "model.tied_embeddings = true\n"), HasSubstr("needs an output head of its own"));
  EXPECT_THAT(refusal(moe + "model.recompute = true\n"), HasSubstr("model.recompute: not for mixtures of experts"));
  EXPECT_THAT(refusal(moe + "parallel.strategy = \"ddp\"\n"), HasSubstr("zero1, zero2 or zero3, got ddp"));
  EXPECT_THAT(refusal(moe + "mesh.axes = [\"dp=4\"]\n"), HasSubstr("set parallel.expert_ranks instead"));
  EXPECT_THAT(refusal(moe + "run.capture = true\n"), HasSubstr("run.capture"));
  EXPECT_THAT(refusal(moe + "data.mask_document_starts = true\n"), HasSubstr("data.mask_document_starts"));
}

TEST_F(ConfigTest, MeshAxesKeepTheirOrder) {
  const auto axes = mesh_axes(read(kData + "mesh.axes = [\"outer=2\", \"inner=3\"]\nrun.ranks = 6\n"));
  ASSERT_EQ(axes.size(), 2U);
  EXPECT_EQ(axes[0].name, "outer");
  EXPECT_EQ(axes[1].size, 3);
}

TEST(EditDistance, CountsLetters) {
  EXPECT_EQ(edit_distance("", ""), 0U);
  EXPECT_EQ(edit_distance("abc", ""), 3U);
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3U);
}

}  // namespace
}  // namespace fsdp::app
