// `fsdp bench train`: a whole training step of a preset with optimizer, sharded and by hand.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace fsdp::app {

struct BenchTrainCommand {
  std::string preset = "1B";
  // bare: bf16 weights, fp32 main weights, clipping and fused AdamW as one writes them by hand. sharded: the library,
  // as `fsdp train` uses it; +graph: each step is one CUDA graph.
  std::vector<std::string> modes{"bare", "sharded"};
  std::int64_t sequences = 4, context = 4096;
  int rounds = 10;
  // Ranks of `sharded`: rank 0 of so many on a loopback that copies, or real ranks, one a GPU, started here.
  int ranks = 1;
  bool nccl = false;
};

// Prints one JSON object a mode: step time, tokens a second of one rank, model FLOP utilisation of an H200 (989 TFLOP/s
// in bf16). Every rank has `sequences` of its own.
int bench_train(const BenchTrainCommand& command);

}  // namespace fsdp::app
