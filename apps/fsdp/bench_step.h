// `fsdp bench step`: what sharding adds to a training step on one GPU.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace fsdp::app {

struct BenchStepCommand {
  std::string shape = "A";
  // bare: the model alone. sharded: ZeRO-3 as rank 0 of `ranks` on a loopback. control: bare, with the same copies on
  // side streams. What follows, each after a +:
  //   graph    each step is one CUDA graph
  //   late     ContextOptions::late_first_prefetch
  //   keep=G   units stay gathered until backward while G GiB allow
  // and between real ranks:
  //   kernel   reductions are NCCL's kernel (Reducer::kernel) instead of copies
  //   nccl     gathers are NCCL's (ContextOptions::one_sided_gathers)
  //   rings    no registered memory (ContextOptions::symmetric_memory): NCCL's rings
  std::vector<std::string> modes{"bare", "sharded"};
  int ranks = 4, rounds = 12, depth = 1;
  bool link = false;   // the loopback takes the time of a link
  bool nccl = false;   // real ranks, one a GPU, started here; no loopback
  bool serve = false;  // runs the mode named on each line of the input, as often as the number after it says
};

// Medians over the rounds.
struct StepSummary {
  std::string mode;
  double step_ms = 0, least_step_ms = 0;
  double forward_host_us = 0, backward_host_us = 0;  // a unit
  double communication_host_us = 0;                  // of both: inside the communication backend
  double peak_gib = 0;
  int rounds = 0;
};

// Runs the modes in turns, round by round. Empty on ranks other than 0, and with `serve`; the code says how a process
// that started ranks ended, when it did.
struct StepMeasurement {
  std::optional<int> code;
  std::vector<StepSummary> modes;
};
[[nodiscard]] StepMeasurement measure_steps(const BenchStepCommand& command);

// Prints one JSON object a mode.
int bench_step(const BenchStepCommand& command);

// Prints what sharding adds to the host time of a unit.
int bench_host(const BenchStepCommand& command);

}  // namespace fsdp::app
