#include "models/transformer.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "fsdp/base/error.h"
#include "fsdp/runtime/simulated/meta_kernels.h"
#include "models/presets.h"
#include "models/sampling.h"

namespace fsdp::models {
namespace {

using ::testing::HasSubstr;

const TransformerConfig kSmall{
    .vocabulary = 17, .layers = 2, .width = 24, .heads = 6, .kv_heads = 2, .ffn_width = 40, .max_context = 16};

at::Tensor random_tokens(std::int64_t batch, std::int64_t positions) {
  return at::randint(kSmall.vocabulary, {batch, positions}, at::kLong);
}

TEST(Transformer, ShapesAndParameterCount) {
  for (const bool tied : {false, true}) {
    auto config = kSmall;
    config.tied_embeddings = tied;
    Transformer model(config);
    EXPECT_EQ(model->forward(random_tokens(3, 7)).sizes(), (std::vector<std::int64_t>{3, 7, 17}));
    const auto loss = model->loss(random_tokens(3, 7), random_tokens(3, 7));
    EXPECT_EQ(loss.dim(), 0);
    EXPECT_NEAR(loss.item<double>(), std::log(17.0), 0.1);  // knows nothing yet
    std::int64_t count = 0;
    for (const auto& parameter : model->parameters()) count += parameter.numel();
    EXPECT_EQ(count, config.parameter_count());
  }
}

TEST(Transformer, TiedEmbeddingsAreOneParameter) {
  auto config = kSmall;
  config.tied_embeddings = true;
  Transformer tied(config), untied(kSmall);
  EXPECT_EQ(tied->parameters().size() + 1, untied->parameters().size());
  tied->loss(random_tokens(2, 5), random_tokens(2, 5)).backward();
  // Reached through the head even for tokens that the input never held.
  EXPECT_TRUE((tied->named_parameters()["embedding.weight"].grad().abs().sum(1) > 0).all().item<bool>());
}

TEST(Transformer, GroupedQueriesEqualFullAttentionWithRepeatedHeads) {
  at::NoGradGuard no_grad;
  auto full_config = kSmall;
  full_config.kv_heads = full_config.heads;
  Transformer grouped(kSmall), full(full_config);
  auto target = full->named_parameters();
  for (const auto& source : grouped->named_parameters()) {
    auto value = source.value();
    if (value.sizes() != target[source.key()].sizes()) {
      value = value.view({2, 1, 4, 24}).expand({2, 3, 4, 24}).reshape({24, 24});  // kv_heads, repeats, head width
    }
    target[source.key()].copy_(value);
  }
  const auto tokens = random_tokens(2, 9);
  EXPECT_TRUE(at::allclose(grouped->forward(tokens), full->forward(tokens), 1e-5, 1e-6));
}

TEST(Transformer, APositionSeesOnlyWhatIsBeforeIt) {
  at::NoGradGuard no_grad;
  Transformer model(kSmall);
  const auto tokens = random_tokens(1, 10);
  auto changed = tokens.clone();
  changed[0][6] = (tokens[0][6].item<std::int64_t>() + 1) % 17;
  const auto a = model->forward(tokens), b = model->forward(changed);
  EXPECT_TRUE(at::allclose(a.narrow(1, 0, 6), b.narrow(1, 0, 6), 1e-5, 1e-6));
  EXPECT_FALSE(at::allclose(a.narrow(1, 6, 1), b.narrow(1, 6, 1), 1e-5, 1e-6));
}

TEST(Transformer, RotationKeepsRelativePositions) {
  RotaryTable rotary(8, 10000.0);
  const auto query = at::randn({1, 1, 1, 8}).expand({1, 12, 1, 8}), key = at::randn({1, 1, 1, 8}).expand({1, 12, 1, 8});
  const auto q = rotary.rotate(query).view({12, 8}), k = rotary.rotate(key).view({12, 8});
  EXPECT_TRUE(at::allclose(q[0], query[0][0][0]));
  EXPECT_NEAR(q[5].dot(k[3]).item<double>(), q[11].dot(k[9]).item<double>(), 1e-4);
  EXPECT_NEAR(q[7].norm().item<double>(), query[0][0].norm().item<double>(), 1e-4);
}

TEST(Transformer, RunsOnMetaTensors) {
  register_meta_kernels();
  auto config = *find_preset("8B");
  config.device = c10::kMeta;
  Transformer model(config);
  for (const auto& parameter : model->parameters()) EXPECT_TRUE(parameter.is_meta());
  const auto tokens = at::empty({1, 8}, at::TensorOptions().dtype(at::kLong).device(c10::kMeta));
  EXPECT_EQ(model->forward(tokens).sizes(), (std::vector<std::int64_t>{1, 8, 128256}));
}

TEST(Transformer, InitialisationFollowsTheName) {
  const auto make = [](const std::string& name, std::vector<std::int64_t> sizes) {
    auto generator = at::detail::createCPUGenerator(5);
    at::Tensor whole = at::empty(sizes);
    initialize_transformer(kSmall, name, whole, generator);
    return whole;
  };
  const auto query = make("blocks.0.attention.query.weight", {200, 200});
  EXPECT_TRUE(at::equal(query, make("blocks.0.attention.query.weight", {200, 200})));
  EXPECT_NEAR(query.std().item<double>(), 0.02, 1e-3);
  EXPECT_NEAR(make("blocks.1.feed_forward.down.weight", {200, 200}).std().item<double>(), 0.01,
              1e-3);  // 0.02 / sqrt(2 * 2)
  EXPECT_TRUE((make("norm.weight", {24}) == 1).all().item<bool>());
}

TEST(Transformer, ImpossibleShapesAreRefused) {
  const auto refusal = [](TransformerConfig config) -> std::string {
    try {
      Transformer model(config);
    } catch (const UsageError& error) {
      return error.what();
    }
    return "no error";
  };
  auto config = kSmall;
  config.heads = 5;
  EXPECT_THAT(refusal(config), HasSubstr("model.heads: expected a divisor of model.width 24, got 5"));
  config = kSmall;
  config.layers = 0;
  EXPECT_THAT(refusal(config), HasSubstr("model.layers: expected at least 1, got 0"));
  Transformer model(kSmall);
  EXPECT_THROW(static_cast<void>(model->forward(random_tokens(1, 17))), UsageError);
}

TEST(Presets, HaveTheSizesOfTheirNames) {
  const auto millions = [](const char* name) {
    return static_cast<double>(find_preset(name)->parameter_count()) * 1e-6;
  };
  EXPECT_NEAR(millions("160M"), 160, 5);
  EXPECT_NEAR(millions("1B"), 1236, 1);
  EXPECT_NEAR(millions("8B"), 8030, 1);
  for (const auto name : preset_names()) EXPECT_NO_THROW(find_preset(name)->validate()) << name;
  EXPECT_FALSE(find_preset("9B").has_value());
}

TEST(Transformer, RecomputedBlocksGiveEqualGradients) {
  auto config = kSmall;
  Transformer plain(config);
  config.recompute = true;
  Transformer recomputed(config);
  at::NoGradGuard no_grad;
  for (auto& item : plain->named_parameters()) recomputed->named_parameters()[item.key()].copy_(item.value());
  const auto tokens = random_tokens(2, 7), targets = random_tokens(2, 7);
  at::AutoGradMode grad_mode(true);
  const auto a = plain->loss(tokens, targets), b = recomputed->loss(tokens, targets);
  EXPECT_TRUE(at::equal(a, b));
  a.backward();
  b.backward();
  for (auto& item : plain->named_parameters()) {
    EXPECT_TRUE(at::equal(recomputed->named_parameters()[item.key()].grad(), item.value().grad())) << item.key();
  }
}

TEST(Sampling, IsRepeatableAndCropsTheContext) {
  Transformer model(kSmall);
  const LogitsFunction logits = [&](const at::Tensor& tokens) { return model->forward(tokens); };
  const SamplingOptions options{
      .length = 30, .context = kSmall.max_context, .temperature = 1.0, .seed = 9};  // longer than max_context
  const auto a = sample_tokens(logits, {1, 2, 3}, options);
  EXPECT_EQ(a.size(), 30U);
  EXPECT_EQ(a, sample_tokens(logits, {1, 2, 3}, options));
  EXPECT_EQ(sample_tokens(logits, {1}, {.length = 5, .temperature = 0}),
            sample_tokens(logits, {1}, {.length = 5, .temperature = 0, .seed = 1}));
  EXPECT_THROW(static_cast<void>(sample_tokens(logits, {}, options)), UsageError);
  EXPECT_THROW(static_cast<void>(sample_tokens(logits, {1}, {.context = 0})), UsageError);
}

}  // namespace
}  // namespace fsdp::models
