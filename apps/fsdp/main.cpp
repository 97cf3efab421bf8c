// The command `fsdp`. Exit codes: 0, 1 the run failed, 2 the command line or a setting is wrong, 130 after Ctrl-C.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>

#include "apps/fsdp/bench_command.h"
#include "apps/fsdp/checkpoint_command.h"
#include "apps/fsdp/config_table.h"
#include "apps/fsdp/console.h"
#include "apps/fsdp/data_command.h"
#include "apps/fsdp/info.h"
#include "apps/fsdp/silent_exit.h"
#include "apps/fsdp/train.h"

namespace {

constexpr int kFailed = 1, kUsage = 2;

int fail(int code, const std::string& message) {
  std::fputs(fmt::format("fsdp: error: {}\n", message).c_str(), stderr);
  return code;
}

int run(int argc, char** argv) {
  CLI::App app("Fully sharded data parallel training");
  app.require_subcommand(1);

  fsdp::app::TrainCommand command;
  int ranks = 0;
  bool help_config = false, print_config = false;
  auto* train = app.add_subcommand("train", "Train a transformer on text");
  auto* config = train->add_option("--config", command.sources.file, "TOML file with the settings");
  auto* ranks_option = train->add_option(
      "--ranks", ranks, "In-process ranks; overrides run.ranks. Not with mpirun or srun, which start the ranks");
  train->add_option("--set", command.sources.settings, "key=value; overrides the file, may be repeated");
  train->add_option("--log", command.log, "Write one JSON object a step to this file");
  train->add_option("--profile", command.profile, "Write a Chrome trace of a few steps to this file");
  train->add_flag("--help-config", help_config, "Explain every setting: type, range, default, meaning; and end");
  train->add_flag("--print-config", print_config, "Print all settings as they result, as a TOML file; and end");
  fsdp::app::DataCommand data;
  data.add_to(app);
  fsdp::app::BenchCommand bench;
  bench.add_to(app);
  fsdp::app::CheckpointCommand checkpoint;
  checkpoint.add_to(app);
  auto* info = app.add_subcommand("info", "Print versions and backends");

  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& help) {
    return app.exit(help);
  } catch (const CLI::ParseError& error) {
    return fail(kUsage, fmt::format("{}; see fsdp --help", error.what()));
  }
  if (info->parsed()) {
    fsdp::app::console::print(fsdp::app::info());
    return 0;
  }
  if (data.parsed()) return data.run();
  if (bench.parsed()) return bench.run();
  if (checkpoint.parsed()) return checkpoint.run();
  if (help_config) {
    fsdp::app::console::print(fsdp::app::describe_fields());
    return 0;
  }
  if (config->count() == 0) return fail(kUsage, "--config is missing: expected a TOML file; see fsdp train --help");
  if (ranks_option->count() > 0) command.sources.ranks = ranks;
  if (print_config) {
    const auto launcher = fsdp::find_launcher();
    const auto config = fsdp::app::resolve_config(command.sources, launcher);
    if (!launcher || launcher->rank == 0) fsdp::app::console::print(fsdp::app::to_toml(config));
    return 0;
  }
  return fsdp::app::train(command);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const fsdp::app::SilentExit& exit) {
    return exit.code;
  } catch (const fsdp::UsageError& error) {
    return fail(kUsage, error.what());
  } catch (const std::exception& error) {
    const std::string what = error.what();
    return fail(kFailed, what.substr(0, what.find("\nException raised from")));  // LibTorch adds a stack trace
  }
}
