// The subcommands of `fsdp bench`.
#pragma once

#include "apps/fsdp/bench_collectives.h"
#include "apps/fsdp/bench_overlap.h"
#include "apps/fsdp/bench_schedule.h"
#include "apps/fsdp/bench_step.h"
#include "apps/fsdp/bench_train.h"

namespace CLI {
class App;
}

namespace fsdp::app {

struct BenchCommand {
  BenchStepCommand step;
  BenchStepCommand host{.shape = "32,1024,64,2752", .rounds = 30};
  BenchCollectivesCommand collectives;
  BenchOverlapCommand overlap;
  BenchScheduleCommand schedule;
  BenchTrainCommand train;

  void add_to(CLI::App& app);
  [[nodiscard]] bool parsed() const;
  // Prints the results, returns the exit code.
  [[nodiscard]] int run() const;

 private:
  CLI::App *command_ = nullptr, *step_ = nullptr, *host_ = nullptr, *collectives_ = nullptr, *overlap_ = nullptr,
           *schedule_ = nullptr, *train_ = nullptr;
};

}  // namespace fsdp::app
