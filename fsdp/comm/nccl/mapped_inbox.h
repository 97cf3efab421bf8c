// PeerInbox over memory that processes of one host map from each other.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <optional>
#include <string>

#include "fsdp/comm/collective.h"
#include "fsdp/comm/nccl/peer_mapping.h"
#include "fsdp/comm/nccl/stream_meeting.h"
#include "fsdp/comm/peer_inbox.h"
#include "fsdp/runtime/kernels.h"

namespace fsdp {

class MappedInbox final : public PeerInbox {
 public:
  // Collective, blocks the host. Null, on all ranks, when some rank could not; `why` says why where this one could not.
  // `kernels` must outlive it.
  static std::unique_ptr<MappedInbox> create(Bytes largest_share, Kernels& kernels, const PeerGroup& group,
                                             std::string& why);

  [[nodiscard]] Bytes largest_share() const override { return largest_share_; }
  [[nodiscard]] Bytes size() const override { return own_->size(); }

  // Enqueues a reduce-scatter on the current stream, which is `stream`.
  void reduce(const Collective& operation, cudaStream_t stream);

 private:
  MappedInbox(Bytes largest_share, Kernels& kernels, const PeerGroup& group)
      : largest_share_(largest_share), kernels_(kernels), rank_(group.rank), size_(group.size) {}
  [[nodiscard]] std::byte* at(int rank) const;  // this rank's, or what is mapped of another's

  const Bytes largest_share_;
  Kernels& kernels_;
  const int rank_, size_;
  std::unique_ptr<MappedRange> own_;  // the others' parts, in rank order, then the meeting's flags
  PeerRanges peers_;                  // [rank][0]
  std::optional<StreamMeeting> meeting_;
};

}  // namespace fsdp
