// Rank 0 of N on one GPU, for measuring what a rank does without having the others.
#pragma once

namespace fsdp {

// The other ranks are taken to hold the same shards, and to add nothing to gradients. Memory and host time are those of
// a real rank, but for NCCL's own.
struct LoopbackOptions {
  int size = 4;  // ranks, this one included
  enum class Mode {
    // Data of the right size is copied on the device, in one batch. Its multiprocessors do that, whatever is asked for
    // (a driver 580 on an H200 has no other way within one device), so a copy beside a product runs at its end.
    copy,
    // An operation takes the time of a link, and holds multiprocessors as a ring would, or none as a copy engine does.
    // Data moves only the first time that a place is written, so numbers are not those of a step.
    link,
  };
  Mode mode = Mode::copy;
  // Of a link: bytes that a rank sends or receives a second, time before the first byte, multiprocessors held.
  double gather_gigabytes_per_second = 372, reduce_gigabytes_per_second = 282;
  double latency_microseconds = 15;
  int gather_multiprocessors = 0, reduce_multiprocessors = 16;
};

}  // namespace fsdp
