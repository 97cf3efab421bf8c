// PeerInbox over memory that processes of one host map from each other.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <string>

#include "fsdp/comm/collective.h"
#include "fsdp/comm/nccl/peer_mapping.h"
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
  MappedInbox(Bytes largest_share, Kernels& kernels, const PeerGroup& group);
  [[nodiscard]] std::uint32_t* flags_in(const MappedRange& range, int which) const;
  // Others' work on their streams before the meeting comes before this rank's after it.
  void meet(cudaStream_t stream);

  const Bytes largest_share_;
  Kernels& kernels_;
  const int rank_, size_;
  std::int64_t flags_begin_ = 0;      // bytes, in a piece
  std::unique_ptr<MappedRange> own_;  // the others' parts, in rank order, then flags
  PeerRanges peers_;                  // [rank][0]
  std::uint32_t meetings_ = 0;        // outside of graphs
};

}  // namespace fsdp
