#include "apps/fsdp/train.h"

#include <fmt/format.h>

#include <filesystem>
#include <vector>

#include "apps/fsdp/config_check.h"
#include "apps/fsdp/console.h"
#include "apps/fsdp/interrupt.h"
#include "apps/fsdp/output_path.h"
#include "apps/fsdp/trainer.h"
#include "fsdp/base/log.h"
#include "fsdp/mesh/run_ranks.h"

namespace fsdp::app {
namespace {

std::string describe(const TrainConfig& config, const TextDataset& data) {
  const auto& shape = config.model.shape;
  const auto& run = config.run;
  return fmt::format(
      "model: {} parameters, {} layers x {} wide, {} heads, {} kv heads\n"
      "data: {} of training text, {} held out\n"
      "run: {} in-process ranks, {}, {} steps of {} sequences x {} tokens in {} microbatches",
      shape.parameter_count(), shape.layers, shape.width, shape.heads, shape.kv_heads,
      format_bytes(static_cast<std::int64_t>(data.train_text().size())),
      format_bytes(static_cast<std::int64_t>(data.validation_text().size())), run.ranks, config.parallel.strategy,
      run.steps, run.batch, run.context, run.microbatches);
}

std::string describe(const RunResult& result) {
  std::string text = fmt::format("{} steps in {} ({:.0f} tokens/s), {:.1f} % of the time exposed", result.steps,
                                 format_duration(result.seconds), result.tokens_per_second(), 100 * result.exposed);
  if (result.skipped_steps > 0)
    text += fmt::format(", {} steps skipped for gradients that were not finite", result.skipped_steps);
  if (result.out_of_time) text += ", ended by run.max_seconds";
  if (result.interrupted) text += ", interrupted";
  return text;
}

RunResult run(const TrainShared& shared) {
  RunResult result;
  try {
    run_ranks(static_cast<int>(shared.config.run.ranks), [&](World world) {
      const bool leads = world.rank() == Rank(0);
      Trainer trainer(std::move(world), shared);
      const auto own = trainer.run();
      if (leads) result = own;
    });
  } catch (const std::exception& error) {
    const std::string what = error.what();  // without the stack trace that LibTorch adds
    throw RunFailure(what.substr(0, what.find("\nException raised from")));
  }
  return result;
}

}  // namespace

int train(const TrainCommand& command) {
  // Throws when a launcher started several processes: each would train alone.
  static_cast<void>(World::from_environment());
  const TrainConfig config = read_train_config(command.sources);
  validate_train_config(config);
  const TextDataset data(config.data.files, {.context = config.run.context,
                                             .validation_fraction = config.data.validation_fraction,
                                             .seed = static_cast<std::uint64_t>(config.run.seed)});
  std::vector<std::filesystem::path> inputs(config.data.files.begin(), config.data.files.end());
  inputs.emplace_back(command.sources.file);
  check_output_file(command.log, "--log", inputs);
  if (!command.log.empty()) inputs.push_back(command.log);
  check_output_file(command.profile, "--profile", inputs);
  if (!command.profile.empty()) make_parent_folder(command.profile, "--profile");
  RunLog log(command.log);
  Progress progress({.live = console::is_terminal(),
                     .steps = config.run.steps,
                     .log_interval = config.run.log_interval,
                     .max_seconds = config.run.max_seconds});
  log::set_sink([&](log::Level level, std::string_view message) {
    level == log::Level::warning ? progress.warning(message) : progress.line(message);
  });
  progress.line(describe(config, data));
  install_interrupt_handler();

  RunResult result;
  try {
    result = run({config, data, progress, log, command.profile});
  } catch (...) {
    log::set_sink({});
    throw;
  }
  log::set_sink({});
  log.done(result);
  progress.line(describe(result));
  if (!command.log.empty()) progress.line(fmt::format("log: {}", command.log.string()));
  if (!command.profile.empty()) progress.line(fmt::format("trace: {}", command.profile.string()));
  return result.interrupted ? 130 : 0;
}

}  // namespace fsdp::app
