// PeerMemory over memory that processes of one host map from each other.
#pragma once

#include <cuda_runtime_api.h>

#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "fsdp/comm/nccl/mapped_memory.h"
#include "fsdp/comm/nccl/peer_mapping.h"
#include "fsdp/comm/nccl/stream_meeting.h"
#include "fsdp/comm/peer_memory.h"

namespace fsdp {

class MappedPeerMemory final : public PeerMemory {
 public:
  // Collective, blocks the host. Null when some rank could not; `why` says why where this one could not.
  // `kernels` must outlive it.
  static std::shared_ptr<MappedPeerMemory> create(const std::vector<PeerPart>& parts, Kernels& kernels,
                                                  const PeerGroup& group, std::string& why);

  [[nodiscard]] void* share(int part) const override;
  [[nodiscard]] void* acquire(int part) override;
  void release(void* whole) override;
  [[nodiscard]] bool contains(const void* whole) const override { return wholes_.contains(whole); }
  [[nodiscard]] Bytes places_size() const override { return places_size_; }

  // Enqueues the copies of the other ranks' shares to where `whole` wants them.
  void read_peers(void* whole, cudaStream_t stream) const;
  void meet(cudaStream_t stream) { meeting_->meet(stream); }

 private:
  // Memory for the peers' shares of parts of one size: those of lower ranks, those of higher ones; null: none.
  struct Place {
    std::shared_ptr<MemoryPiece> before, after;
    bool taken = false;
  };
  struct Part {
    std::int64_t share = 0;  // bytes
    std::shared_ptr<MemoryPiece> own;
    std::unique_ptr<MappedRange> resting;
    std::vector<std::unique_ptr<MappedRange>> wholes;  // [place]
  };

  void make_own(const std::vector<PeerPart>& parts);
  void touch_peers() const;

  int rank_ = 0, size_ = 1;
  std::vector<Part> parts_;
  std::unique_ptr<MappedRange> flags_;  // of the meeting
  PeerRanges peers_;                    // [rank][part, and flags]
  std::optional<StreamMeeting> meeting_;
  std::map<std::int64_t, std::vector<Place>> places_;  // by share
  std::map<const void*, std::pair<int, int>> wholes_;  // address -> part, place
  Bytes places_size_;
};

}  // namespace fsdp
