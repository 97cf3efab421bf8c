#include "apps/fsdp/config_check.h"

#include <charconv>
#include <set>

#include "fsdp/base/check.h"
#include "models/presets.h"

namespace fsdp::app {
namespace {

MeshAxis parse_axis(const std::string& text) {
  const auto split = text.find('=');
  int size = 0;
  if (split != std::string::npos && split > 0) {
    const char* end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data() + split + 1, end, size);
    if (error != std::errc{} || stop != end) size = 0;
  }
  FSDP_CHECK(size >= 1, UsageError, "mesh.axes: expected entries like \"dp=2\" with a size of at least 1, got \"{}\"",
             text);
  return {text.substr(0, split), size};
}

}  // namespace

std::vector<MeshAxis> mesh_axes(const TrainConfig& config) {
  const auto ranks = config.run.ranks;
  if (config.model.moe.experts > 0) {
    const auto expert_ranks = config.parallel.expert_ranks;
    FSDP_CHECK(config.mesh.axes.empty(), UsageError,
               "mesh.axes: a mixture of experts makes its own, \"edp\" and \"ep\"; set parallel.expert_ranks instead");
    FSDP_CHECK(ranks % expert_ranks == 0, UsageError,
               "parallel.expert_ranks: expected a divisor of the {} ranks, got {}", ranks, expert_ranks);
    return {{"edp", static_cast<int>(ranks / expert_ranks)}, {"ep", static_cast<int>(expert_ranks)}};
  }
  if (config.mesh.axes.empty()) return {{"dp", static_cast<int>(ranks)}};
  std::vector<MeshAxis> axes;
  std::set<std::string> names;
  std::int64_t product = 1;
  for (const auto& text : config.mesh.axes) {
    axes.push_back(parse_axis(text));
    FSDP_CHECK(names.insert(axes.back().name).second, UsageError, "mesh.axes: the axis {} is named twice",
               axes.back().name);
    product *= axes.back().size;
    FSDP_CHECK(product <= 1'000'000, UsageError, "mesh.axes: more than a million ranks");
  }
  FSDP_CHECK(product == ranks, UsageError,
             "mesh.axes make {} ranks, but there are {} (run.ranks, --ranks or the processes of a launcher): make the "
             "two equal",
             product, ranks);
  return axes;
}

models::MoeConfig moe_config(const TrainConfig& config) {
  models::MoeConfig moe = config.model.moe;
  moe.base = config.model.shape;
  return moe;
}

std::int64_t parameter_count(const TrainConfig& config) {
  return config.model.moe.experts > 0 ? moe_config(config).parameter_count() : config.model.shape.parameter_count();
}

namespace {

void validate_moe(const TrainConfig& config) {
  moe_config(config).validate();
  const auto& parallel = config.parallel;
  FSDP_CHECK(config.model.moe.experts % parallel.expert_ranks == 0, UsageError,
             "parallel.expert_ranks: expected a divisor of model.experts = {}, got {}", config.model.moe.experts,
             parallel.expert_ranks);
  FSDP_CHECK(parallel.strategy == "zero1" || parallel.strategy == "zero2" || parallel.strategy == "zero3", UsageError,
             "parallel.strategy: a mixture of experts is sharded by zero1, zero2 or zero3, got {}", parallel.strategy);
  FSDP_CHECK(
      config.model.moe.dense_layers < config.model.shape.layers, UsageError,
      "model.dense_layers: expected fewer than model.layers = {}, got {}; for a dense model set model.experts = 0",
      config.model.shape.layers, config.model.moe.dense_layers);
  const ParallelConfig defaults;
  const auto fixed = [](const char* key, bool is_default) {
    FSDP_CHECK(
        is_default, UsageError,
        "{}: not with a mixture of experts, whose schedule gathers, keeps and reduces units by itself; leave it out",
        key);
  };
  fixed("parallel.reshard", parallel.reshard == defaults.reshard);
  fixed("parallel.keep_last", parallel.keep_last == defaults.keep_last);
  fixed("parallel.keep_first", parallel.keep_first == defaults.keep_first);
  fixed("parallel.reduction_delay", parallel.reduction_delay == defaults.reduction_delay);
  FSDP_CHECK(parallel.prefetch == "depth" || parallel.prefetch == "none", UsageError,
             "parallel.prefetch: expected depth or none with a mixture of experts, got {}", parallel.prefetch);
  FSDP_CHECK(!config.run.capture, UsageError,
             "run.capture: a step of a mixture of experts cannot be captured, for the host must know how many tokens "
             "each expert gets");
  FSDP_CHECK(
      !config.data.mask_document_starts, UsageError,
      "data.mask_document_starts: not with a mixture of experts; its microbatches' losses are means over equally "
      "many targets");
}

// Whoever sets them means a mixture, and has forgotten that it needs experts.
void refuse_keys_of_mixtures(const TrainConfig& config) {
  const models::MoeConfig &set = config.model.moe, preset = *models::find_moe_preset(config.model.preset);
  const ParallelConfig &parallel = config.parallel, defaults;
  const auto unset = [](const char* key, bool is_default) {
    FSDP_CHECK(is_default, UsageError, "{} is of mixtures of experts, but model.experts is 0: set it, or leave {} out",
               key, key);
  };
  unset("model.top_k", set.top_k == preset.top_k);
  unset("model.expert_width", set.expert_width == preset.expert_width);
  unset("model.shared_width", set.shared_width == preset.shared_width);
  unset("model.dense_layers", set.dense_layers == preset.dense_layers);
  unset("model.auxiliary_loss", set.auxiliary_loss == preset.auxiliary_loss);
  unset("model.bias_rate", set.bias_rate == preset.bias_rate);
  unset("parallel.expert_ranks", parallel.expert_ranks == defaults.expert_ranks);
  unset("parallel.schedule", parallel.schedule == defaults.schedule);
  unset("parallel.delay_weight_gradients", parallel.delay_weight_gradients == defaults.delay_weight_gradients);
  unset("parallel.release_early", parallel.release_early == defaults.release_early);
}

}  // namespace

void validate_train_config(const TrainConfig& config) {
  const auto& run = config.run;
  config.model.shape.validate();
  FSDP_CHECK(run.context <= config.model.shape.max_context, UsageError,
             "run.context: expected at most model.max_context = {}, got {}; raise model.max_context",
             config.model.shape.max_context, run.context);
  FSDP_CHECK(run.batch % (run.ranks * run.microbatches) == 0, UsageError,
             "run.batch: expected a multiple of ranks x microbatches = {} x {} = {}, got {}", run.ranks,
             run.microbatches, run.ranks * run.microbatches, run.batch);

  if (config.model.moe.experts > 0)
    validate_moe(config);
  else
    refuse_keys_of_mixtures(config);
  const auto axes = mesh_axes(config);
  const bool hybrid = config.parallel.strategy == "hsdp" || config.parallel.strategy == "hfsdp";
  FSDP_CHECK(!hybrid || axes.size() == 2, UsageError,
             "parallel.strategy {} needs a mesh of two axes, such as mesh.axes = [\"outer=2\", \"inner=2\"]; got {}",
             config.parallel.strategy, axes.size());

  FSDP_CHECK(config.optimizer.warmup_steps <= run.steps, UsageError,
             "optimizer.warmup_steps: expected at most run.steps = {}, got {}", run.steps,
             config.optimizer.warmup_steps);
  FSDP_CHECK(!run.capture || config.optimizer.name == "adamw", UsageError,
             "run.capture needs optimizer.name = \"adamw\", whose learning rate a captured step reads anew; got {}",
             config.optimizer.name);
  FSDP_CHECK(!run.capture || !config.model.shape.recompute, UsageError,
             "run.capture and model.recompute exclude each other: what a recomputed function needs cannot be captured");
  FSDP_CHECK(run.sample_length == 0 || !run.sample_prompt.empty(), UsageError,
             "run.sample_prompt: expected at least one character to continue, got none; set run.sample_length = 0 for "
             "no sample");
  FSDP_CHECK(!config.data.files.empty(), UsageError, "data.files: expected at least one file, got an empty list");
  FSDP_CHECK(config.data.weights.empty() || config.data.weights.size() == config.data.files.size(), UsageError,
             "data.weights: expected one number a file, {} for data.files, got {}", config.data.files.size(),
             config.data.weights.size());
}

}  // namespace fsdp::app
