// What a communication backend implements for one group of ranks.
#pragma once

#include "fsdp/base/types.h"
#include "fsdp/comm/collective.h"

namespace fsdp {

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
};

}  // namespace fsdp
