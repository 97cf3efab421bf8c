// `fsdp bench schedule`: what the merged schedule of a mixture of experts hides.
#pragma once

#include <cstdint>
#include <string>

namespace fsdp::app {

struct BenchScheduleCommand {
  std::string preset = "deepseek-proxy";
  std::int64_t layers = 4;  // instead of the preset's
  std::int64_t sequences = 1, context = 4096;
  int ranks = 4;  // of the loopback, all of them sharing the experts
  int microbatches = 4, rounds = 10;
  bool nccl = false;                       // real ranks, one a GPU, instead of a loopback
  bool simulated = false;                  // on the virtual clock; no GPU
  double link_gigabytes_per_second = 100;  // of the virtual clock's links
  std::string trace;                       // of one merged step, as a Chrome trace
};

// Rank 0 of several, on the virtual clock or on one GPU with a loopback that takes the time of a link for exchanges,
// gathers and reductions, or real ranks, whose times of exchanges include waits for each other; bf16. Prints one JSON
// object for the sequential schedule, the merged one, and the merged one without delayed weight gradients: step time,
// exposed time, the share of the exchanges that is hidden, peak memory.
int bench_schedule(const BenchScheduleCommand& command);

}  // namespace fsdp::app
