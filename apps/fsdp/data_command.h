// `fsdp data`: prepare, inspect and sample token files. Wires options to functions; needs no LibTorch.
//
// Holds what the parser writes to: must outlive the parsing of the CLI::App that it was added to, and must not move.
#pragma once

#include <cstdint>

#include "apps/fsdp/data_inspect.h"
#include "apps/fsdp/data_prepare.h"
#include "apps/fsdp/data_sample.h"

namespace CLI {
class App;
}

namespace fsdp::app {

struct DataCommand {
  DataPrepareOptions prepare;
  DataInspectOptions inspect;
  DataSampleOptions sample;

  void add_to(CLI::App& app);
  // Whether the parsed command line is one of these.
  [[nodiscard]] bool parsed() const;
  // Prints the result, returns the exit code. Throws UsageError, or Error when the disk fails.
  [[nodiscard]] int run() const;

 private:
  CLI::App* command_ = nullptr;
  CLI::App* prepare_command_ = nullptr;
  CLI::App* inspect_command_ = nullptr;
};

}  // namespace fsdp::app
