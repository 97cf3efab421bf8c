// Memory into which the other ranks put their parts of a reduction, on GPUs of one host.
//
// A reduce-scatter through it is made of copies: every rank writes each other one's share of its data there, by copy
// engine, and adds what it has received to its own. No multiprocessor is held while data moves or a rank is late; the
// sum, in fp32, in rank order and rounded once to the data's dtype, may go straight to where it is wanted. Ranks meet
// twice on the stream: before they write, for what lies there must have been added up, and before they add.
//
// One stream at a time uses it. Belongs to whoever made it; a handle for Communicator::reduce_scatter.
#pragma once

#include <c10/core/ScalarType.h>

#include "fsdp/base/types.h"

namespace fsdp {

class PeerInbox {
 public:
  virtual ~PeerInbox() = default;
  [[nodiscard]] virtual Bytes largest_share() const = 0;
  [[nodiscard]] virtual Bytes size() const = 0;
};

// Where a sum goes: destination (+)= sum / divisor.
struct SumDestination {
  void* data = nullptr;
  float divisor = 1;
  c10::ScalarType dtype = c10::kFloat;
  bool overwrite = true;
};

}  // namespace fsdp
