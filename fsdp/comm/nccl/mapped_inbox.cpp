#include "fsdp/comm/nccl/mapped_inbox.h"

#include <c10/cuda/CUDAStream.h>
#include <cuda.h>

#include <array>

#include "fsdp/base/check.h"
#include "fsdp/runtime/cuda/cuda_check.h"
#include "fsdp/runtime/cuda/driver_function.h"
#include "fsdp/runtime/cuda/is_recorded.h"

namespace fsdp {
namespace {

// Two sets of flags, one value a rank: of meetings that streams wait for themselves, and of those by kernel, in graphs.
// They count apart, for a replay is not seen by the host.
constexpr int kOfStreams = 0, kOfGraphs = 1, kCount = 2;
constexpr std::int64_t kFlagBytes = 128;  // of a set: Meeting::kMost values

struct Driver {
  decltype(&cuStreamBatchMemOp) batch;
  Driver() { find_driver_function("cuStreamBatchMemOp", batch); }
};

const Driver& driver() {
  static const Driver* const found = new Driver;
  return *found;
}

CUdeviceptr address_of(const void* memory) { return reinterpret_cast<CUdeviceptr>(memory); }

}  // namespace

MappedInbox::MappedInbox(Bytes largest_share, Kernels& kernels, const PeerGroup& group)
    : largest_share_(largest_share), kernels_(kernels), rank_(group.rank), size_(group.size) {}

std::unique_ptr<MappedInbox> MappedInbox::create(Bytes largest_share, Kernels& kernels, const PeerGroup& group,
                                                 std::string& why) {
  if (group.size > Meeting::kMost) return nullptr;
  std::unique_ptr<MappedInbox> inbox(new MappedInbox(largest_share, kernels, group));
  std::shared_ptr<MemoryPiece> piece;
  bool good = all_manage(group, why, [&] {
    inbox->flags_begin_ = (largest_share.value() * (group.size - 1) + kFlagBytes - 1) / kFlagBytes * kFlagBytes;
    const std::int64_t granularity = piece_granularity().value();
    FSDP_CHECK(granularity > 0, Error, "the device cannot share memory with other processes");
    const std::int64_t size = inbox->flags_begin_ + 3 * kFlagBytes;
    piece = MemoryPiece::create(Bytes((size + granularity - 1) / granularity * granularity), /*shareable=*/true);
    inbox->own_ = std::make_unique<MappedRange>(std::vector{piece});
    FSDP_CUDA_CHECK(cudaMemset(inbox->flags_in(*inbox->own_, 0), 0, 3 * kFlagBytes));
    FSDP_CUDA_CHECK(cudaDeviceSynchronize());
  });
  good = good && map_pieces({piece}, group, inbox->peers_, why);
  // The first copy to a device sets up more.
  const cudaStream_t stream = c10::cuda::getStreamFromPool(/*isHighPriority=*/true).stream();
  good = good && all_manage(group, why, [&] {
           for (int peer = 0; peer < group.size; ++peer) {
             if (peer == group.rank) continue;
             void* to = inbox->peers_[static_cast<std::size_t>(peer)][0]->data();
             FSDP_CUDA_CHECK(cudaMemcpyAsync(to, inbox->own_->data(), kFlagBytes, cudaMemcpyDeviceToDevice, stream));
           }
           FSDP_CUDA_CHECK(cudaStreamSynchronize(stream));
         });
  good = good && all_manage(group, why, [&] {
           inbox->meet(stream);
           FSDP_CUDA_CHECK(cudaStreamSynchronize(stream));
         });
  return good ? std::move(inbox) : nullptr;
}

std::uint32_t* MappedInbox::flags_in(const MappedRange& range, int which) const {
  return reinterpret_cast<std::uint32_t*>(static_cast<std::byte*>(range.data()) + flags_begin_ + which * kFlagBytes);
}

void MappedInbox::meet(cudaStream_t stream) {
  if (is_recorded(stream)) {
    Meeting meeting{
        .count = flags_in(*own_, kCount), .own_flags = flags_in(*own_, kOfGraphs), .rank = rank_, .size = size_};
    for (int peer = 0; peer < size_; ++peer) {
      if (peer != rank_) meeting.peer_flags[peer] = flags_in(*peers_[static_cast<std::size_t>(peer)][0], kOfGraphs);
    }
    kernels_.meet(meeting);
    return;
  }
  ++meetings_;
  std::array<CUstreamBatchMemOpParams, 2 * Meeting::kMost> operations{};
  unsigned count = 0;
  for (int peer = 0; peer < size_; ++peer) {  // after what is on the stream, with a fence of the system
    if (peer == rank_) continue;
    auto& write = operations[count++].writeValue;
    write.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
    write.address = address_of(flags_in(*peers_[static_cast<std::size_t>(peer)][0], kOfStreams) + rank_);
    write.value = meetings_;
    write.flags = CU_STREAM_WRITE_VALUE_DEFAULT;
  }
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    auto& wait = operations[count++].waitValue;
    wait.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
    wait.address = address_of(flags_in(*own_, kOfStreams) + peer);
    wait.value = meetings_;
    wait.flags = CU_STREAM_WAIT_VALUE_GEQ;  // of the difference, so counts may wrap
  }
  FSDP_CHECK(driver().batch(stream, count, operations.data(), 0) == CUDA_SUCCESS, Error,
             "CUDA: a stream could not wait for values of other ranks (cuStreamBatchMemOp)");
}

void MappedInbox::reduce(const Collective& c, cudaStream_t stream) {
  const std::int64_t share = c.count * static_cast<std::int64_t>(c10::elementSize(c.dtype));
  FSDP_INVARIANT(Bytes(share) <= largest_share_);
  const auto* send = static_cast<const std::byte*>(c.send);
  meet(stream);                               // what the others were sent before is added up
  for (int step = 1; step < size_; ++step) {  // not all to the same one at once
    const int peer = (rank_ + step) % size_;
    const int place = rank_ < peer ? rank_ : rank_ - 1;  // among those who send to it
    FSDP_CUDA_CHECK(
        cudaMemcpyAsync(static_cast<std::byte*>(peers_[static_cast<std::size_t>(peer)][0]->data()) + place * share,
                        send + peer * share, static_cast<std::size_t>(share), cudaMemcpyDeviceToDevice, stream));
  }
  meet(stream);  // all parts are there
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
