// The command `fsdp`. Exit codes: 0, 1 the run failed, 2 the command line or a setting is wrong, 130 after Ctrl-C.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>

#include "apps/fsdp/config_table.h"
#include "apps/fsdp/console.h"
#include "apps/fsdp/info.h"
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
  bool list_keys = false;
  auto* train = app.add_subcommand("train", "Train a transformer on text");
  auto* config = train->add_option("--config", command.sources.file, "TOML file with the settings");
  auto* ranks_option = train->add_option("--ranks", ranks, "In-process ranks; overrides run.ranks");
  train->add_option("--set", command.sources.settings, "key=value; overrides the file, may be repeated");
  train->add_option("--log", command.log, "Write one JSON object a step to this file");
  train->add_option("--profile", command.profile, "Write a Chrome trace of a few steps to this file");
  train->add_flag("--list-keys", list_keys, "Print every setting with its default and meaning, and end");
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
  if (list_keys) {
    fsdp::app::console::print(fsdp::app::describe_fields({}));
    return 0;
  }
  if (config->count() == 0) return fail(kUsage, "--config is missing: expected a TOML file; see fsdp train --help");
  if (ranks_option->count() > 0) command.sources.ranks = ranks;
  return fsdp::app::train(command);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const fsdp::UsageError& error) {
    return fail(kUsage, error.what());
  } catch (const std::exception& error) {
    return fail(kFailed, error.what());
  }
}
