// `fsdp bench step`: what sharding adds to a training step on one GPU.
#pragma once

#include <string>
#include <vector>

namespace fsdp::app {

struct BenchStepCommand {
  std::string shape = "A";
  // bare: the model alone. sharded: ZeRO-3 as rank 0 of `ranks` on a loopback. control: bare, with the same copies on
  // side streams. A name ends in +graph: each step is one CUDA graph.
  std::vector<std::string> modes{"bare", "sharded"};
  int ranks = 4, rounds = 12, depth = 1;
  bool link = false;  // the loopback takes the time of a link
  bool late = false;  // ContextOptions::late_first_prefetch
  bool nccl = false;  // real ranks, one a GPU, started here; no loopback
  bool symmetric = true;
  bool serve = false;  // runs the mode named on each line of the input, as often as the number after it says
};

// Prints one JSON object a mode; modes take turns, round by round.
int bench_step(const BenchStepCommand& command);

}  // namespace fsdp::app
