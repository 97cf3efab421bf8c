// What things cost on the virtual clock. Plain numbers, no LibTorch.
#pragma once

#include <cstdint>

#include "fsdp/trace/span.h"

namespace fsdp {

struct CostModel {
  double flops_per_second = 400e12;  // of matrix products and attention
  double memory_bytes_per_second =
      3e12;  // of everything else: bytes read of the operator's inputs, and once that for its output
  double link_bytes_per_second = 200e9;  // of one rank, one direction
  trace::Nanoseconds collective_latency = 10'000;
  trace::Nanoseconds launch = 0;  // host time an operator takes before the device may start it

  [[nodiscard]] trace::Nanoseconds compute(double flops, double bytes) const;

  // A collective in which each of `ranks` ranks sends and receives `bytes_moved`.
  [[nodiscard]] trace::Nanoseconds transfer(double bytes_moved, int ranks) const;
};

}  // namespace fsdp
