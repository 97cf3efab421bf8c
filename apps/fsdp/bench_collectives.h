// `fsdp bench collectives`: gathers and reductions between real ranks, alone, together and beside matrix products.
#pragma once

namespace fsdp::app {

struct BenchCollectivesCommand {
  int ranks = 2;          // one process a GPU, started here unless a launcher did
  int largest_mib = 256;  // whole buffer; from 1 MiB in steps of four
  int rounds = 20;        // in a row, between two waits
};

// Prints a JSON object for each size and way: "ring" (plain memory), "registered" (copy engine or symmetric kernel, by
// size; symmetric reductions), "copies" (reductions as all-to-all by copy engine and a local sum). Times in us an
// operation, bandwidth of the bus in GB/s: bytes that a rank receives (or sends) over time.
int bench_collectives(const BenchCollectivesCommand& command);

}  // namespace fsdp::app
