// Memory in which a unit is gathered by reading the other ranks' shares where they rest, on GPUs of one host.
//
// A gathered unit lies in a range of addresses of its own. This rank's share is mapped into it from where it rests, so
// it is never copied; the others' shares come by copies between the devices into memory that units of the same size
// take turns with. Reading takes no part of the peers: it waits for nobody and nobody waits for it. So ranks must meet
// (Communicator::barrier) before shares may be read and before they may be written again; whoever owns the memory sees
// to that (module/peer_weights.cpp).
//
// Host thread of the rank only.
#pragma once

#include "fsdp/base/types.h"

namespace fsdp {

// The weights of one group: as much on every rank.
struct PeerPart {
  Bytes share;     // a multiple of CommunicatorBackend::peer_granularity()
  int places = 1;  // parts of equal share take turns with as many places as one of them asks for at most
  int kept = 0;    // and as many more as this one keeps for long
};

class PeerMemory {
 public:
  virtual ~PeerMemory() = default;

  // Where this rank's share of part `part` rests, for life.
  [[nodiscard]] virtual void* share(int part) const = 0;
  // A free place for the whole of the part, or null. Its address is the receive buffer of a gather whose send buffer is
  // the share; gathers of the group into it are reads of the peers. Places are used in the order of one stream.
  [[nodiscard]] virtual void* acquire(int part) = 0;
  virtual void release(void* whole) = 0;
  [[nodiscard]] virtual bool contains(const void* whole) const = 0;  // an address that `acquire` has returned

  [[nodiscard]] virtual Bytes places_size() const = 0;  // of all places together
};

}  // namespace fsdp
