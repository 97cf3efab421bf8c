// `fsdp bench train`: a whole training step of a preset on one GPU, with optimizer, sharded over one rank and by hand.
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
};

// Prints one JSON object a mode: step time, tokens a second, model FLOP utilisation of an H200 (989 TFLOP/s in bf16).
int bench_train(const BenchTrainCommand& command);

}  // namespace fsdp::app
