// What a communication backend implements for one group of ranks.
#pragma once

#include <c10/core/Allocator.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/base/types.h"
#include "fsdp/comm/collective.h"
#include "fsdp/comm/peer_inbox.h"
#include "fsdp/comm/peer_memory.h"

namespace fsdp {

class Kernels;

// What a group is for; backends with several paths choose by it.
enum class GroupUse : std::uint8_t { any, gather, reduce };

class CommunicatorBackend {
 public:
  virtual ~CommunicatorBackend() = default;

  // Runs inside a task of the operation's stream. Arguments were checked by Communicator. CPU backends return when the
  // operation is done and throw CommunicationError past the deadline; device backends enqueue on the stream's device.
  virtual void execute(const Collective& operation) = 0;

  // Makes every pending and later operation of the group fail with `reason`, on all its ranks. Any thread.
  virtual void abort(const std::string& reason) = 0;

  // Makes an aborted group usable again; every rank calls it with no operation in flight, blocks until all have.
  virtual void reset() = 0;

  // Compares every operation with the other ranks' before it runs, at the price of a message between hosts each. CPU
  // backends always do.
  virtual void set_check(bool) {}

  // Memory that all ranks of the group register at the same place of the same size, so that operations on it take a
  // faster way. Why it cannot be had; empty when it can: equal on all ranks.
  [[nodiscard]] virtual std::string why_no_symmetric_memory() const { return "this backend has none"; }
  [[nodiscard]] virtual c10::DataPtr allocate_symmetric(Bytes) { return {}; }
  // Collective, blocks the host. Returns whether it could be registered; the caller makes sure that all ranks agree.
  [[nodiscard]] virtual bool register_symmetric(void* /*base*/, Bytes /*size*/) { return false; }
  virtual void deregister_symmetric(void* /*base*/) {}  // before the memory goes
  // For reductions made of copies, of shares of at most so many bytes. Collective, blocks the host. Null, on all ranks,
  // when a rank could not or there are none here; then `why` says what was in the way, where it was.
  [[nodiscard]] virtual std::unique_ptr<PeerInbox> make_inbox(Bytes /*largest_share*/, Kernels&, std::string& /*why*/) {
    return nullptr;
  }

  // Memory in which gathers read the other ranks' shares where they rest. Sizes of shares are multiples of this; 0:
  // there is none, equal on all ranks.
  [[nodiscard]] virtual Bytes peer_granularity() const { return Bytes(0); }
  // Collective, blocks the host. Null when a rank could not; then `why` says what was in the way, where it was.
  [[nodiscard]] virtual std::shared_ptr<PeerMemory> make_peer_memory(const std::vector<PeerPart>&, Kernels&,
                                                                     std::string& /*why*/) {
    return nullptr;
  }

  // Which way operations take, for reports: "ring", "copy engine", ...; empty where there is only one.
  [[nodiscard]] virtual std::string path() const { return {}; }
};

}  // namespace fsdp
