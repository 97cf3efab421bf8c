#include "fsdp/comm/nccl/mapped_inbox.h"

#include <c10/cuda/CUDAStream.h>

#include <utility>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/runtime/cuda/cuda_check.h"

namespace fsdp {
namespace {

constexpr std::int64_t kAlignment = 128;  // of the flags

}  // namespace

std::unique_ptr<MappedInbox> MappedInbox::create(Bytes largest_share, Kernels& kernels, const PeerGroup& group,
                                                 std::string& why) {
  std::unique_ptr<MappedInbox> inbox(new MappedInbox(largest_share, kernels, group));
  const std::int64_t parts = largest_share.value() * (group.size - 1);
  const std::int64_t flags_begin = (parts + kAlignment - 1) / kAlignment * kAlignment;
  std::shared_ptr<MemoryPiece> piece;
  bool good = all_manage(group, why, [&] {
    piece = MemoryPiece::create_rounded(Bytes(flags_begin) + StreamMeeting::kFlags, /*shareable=*/true);
    inbox->own_ = std::make_unique<MappedRange>(std::vector{piece});
    FSDP_CUDA_CHECK(
        cudaMemset(inbox->at(group.rank) + flags_begin, 0, static_cast<std::size_t>(StreamMeeting::kFlags.value())));
    FSDP_CUDA_CHECK(cudaDeviceSynchronize());
  });
  good = good && map_pieces({piece}, group, inbox->peers_, why);
  // The first copy to a device sets up more.
  const cudaStream_t stream = c10::cuda::getStreamFromPool(/*isHighPriority=*/true).stream();
  good =
      good && all_manage(group, why, [&] {
        std::vector<void*> flags;
        for (int rank = 0; rank < group.size; ++rank) {
          flags.push_back(inbox->at(rank) + flags_begin);
          if (rank == group.rank || parts == 0) continue;
          FSDP_CUDA_CHECK(cudaMemcpyAsync(inbox->at(rank), inbox->at(group.rank), 1, cudaMemcpyDeviceToDevice, stream));
        }
        FSDP_CUDA_CHECK(cudaStreamSynchronize(stream));
        inbox->meeting_.emplace(kernels, group.rank, std::move(flags));
      });
  good = good && inbox->meeting_->rehearse(group, why);
  return good ? std::move(inbox) : nullptr;
}

std::byte* MappedInbox::at(int rank) const {
  return static_cast<std::byte*>(rank == rank_ ? own_->data() : peers_[static_cast<std::size_t>(rank)][0]->data());
}

void MappedInbox::reduce(const Collective& c, cudaStream_t stream) {
  const std::int64_t share = c.count * static_cast<std::int64_t>(c10::elementSize(c.dtype));
  FSDP_INVARIANT(Bytes(share) <= largest_share_);
  const auto* send = static_cast<const std::byte*>(c.send);
  meeting_->meet(stream);                     // what the others were sent before is added up
  for (int step = 1; step < size_; ++step) {  // not all to the same one at once
    const int peer = (rank_ + step) % size_;
    const int place = rank_ < peer ? rank_ : rank_ - 1;  // among those who send to it
    FSDP_CUDA_CHECK(cudaMemcpyAsync(at(peer) + place * share, send + peer * share, static_cast<std::size_t>(share),
                                    cudaMemcpyDeviceToDevice, stream));
  }
  meeting_->meet(stream);  // all parts are there
  kernels_.sum_of_parts({.destination = c.destination.data,
                         .destination_dtype = c.destination.dtype,
                         .own = send + rank_ * share,
                         .others = own_->data(),
                         .dtype = c.dtype,
                         .count = c.count,
                         .parts = size_,
                         .own_part = rank_,
                         .divisor = c.destination.divisor,
                         .overwrite = c.destination.overwrite});
}

}  // namespace fsdp
