// One communication operation, described once and handed to a backend.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/base/types.h"
#include "fsdp/comm/peer_inbox.h"
#include "fsdp/trace/span.h"

namespace fsdp {

class PeerMemory;

enum class ReduceOp : std::uint8_t { sum, max };  // averages: sum, then divide; no backend's average is trusted

// The part of a training run that an operation belongs to. Ranks that are in different parts must not mix their data.
struct Stamp {
  std::int32_t step = 0;        // last microbatches whose backward ended
  std::int32_t microbatch = 0;  // of the step
  std::int32_t updates = 0;     // optimizer steps
  bool last = true;             // it is the step's last microbatch
  bool operator==(const Stamp&) const = default;
};

struct Collective {
  trace::Kind kind = trace::Kind::barrier;
  ReduceOp reduce = ReduceOp::sum;
  c10::ScalarType dtype = c10::kFloat;
  bool sending = false;        // send_recv: this rank sends
  std::int32_t peer = 0;       // broadcast: root; send_recv: the other rank
  const void* send = nullptr;  // null where no data exists (simulated) or nothing is sent
  void* receive = nullptr;
  std::int64_t count = 0;     // elements a rank: gathered share, scattered share, or whole buffer
  std::int64_t sequence = 0;  // of this communicator, from 1
  Stamp stamp = {};
  const char* label = "";           // what it is for, such as "FSDP:layers.0:unshard"; lives as long as the process
                                    // (base/intern.h): other ranks read it
  PeerMemory* peers = nullptr;      // barrier: of those who share it
  PeerInbox* inbox = nullptr;       // reduce_scatter: made of copies through it
  SumDestination destination = {};  // of such a reduce_scatter's sum, instead of `receive`
  // all_to_all_v: elements to and from each rank, packed in rank order. [rank]
  std::shared_ptr<const std::vector<std::int64_t>> send_counts, receive_counts;
};

[[nodiscard]] std::string describe(
    const Collective& operation);  // "all_gather \"FSDP:layers.0:unshard\" #12 of 256 Float"

}  // namespace fsdp
