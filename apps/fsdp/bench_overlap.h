// `fsdp bench overlap`: how much of the communication of a step hides under compute, as CUPTI saw it.
#pragma once

#include <string>

namespace fsdp::app {

struct BenchOverlapCommand {
  std::string shape = "4,4096,8192,0";  // four linear units
  std::string strategy = "zero3";
  int ranks = 4, microbatches = 2, steps = 20;
  std::string prefetch = "depth";  // or lists, none, recorded, delayed_release
  int amount = 1, delay = 0;
  bool keep_last = true, unify = false;
  int gather_multiprocessors = 0;           // held by a gather; 0: the copy engine does it
  int carve_out = 0;                        // multiprocessors that matrix products leave free
  bool nccl = false;                        // real ranks, one a GPU, instead of a loopback
  bool symmetric = true, one_sided = true;  // with nccl
  std::string reducer = "copy_engine";      // too
  std::string trace;                        // all steps as a Chrome trace, of rank 0
};

// Rank 0 of several on a loopback that takes the time of a link, or real ranks, each of which profiles itself. Prints
// one JSON object, of rank 0: of all steps the least and most collectives that were hidden, and medians of the times.
// Exit code 1 when a step of a loopback hid fewer than the schedule promises.
int bench_overlap(const BenchOverlapCommand& command);

}  // namespace fsdp::app
