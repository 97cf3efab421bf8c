#include "fsdp/comm/nccl/stream_meeting.h"

#include <c10/cuda/CUDAStream.h>
#include <cuda.h>

#include <array>

#include "fsdp/base/check.h"
#include "fsdp/runtime/cuda/cuda_check.h"
#include "fsdp/runtime/cuda/driver_function.h"
#include "fsdp/runtime/cuda/is_recorded.h"

namespace fsdp {
namespace {

// Sets of flags, a value a rank in each: of meetings that streams wait for themselves; of those by kernel, in graphs,
// where a stream's own wait would keep the value of the recording; and how many of the latter there were.
constexpr int kOfStreams = 0, kOfGraphs = 1, kCount = 2;
constexpr std::int64_t kSetBytes = 128;
static_assert(kSetBytes == Meeting::kMost * sizeof(std::uint32_t) && StreamMeeting::kFlags == Bytes(3 * kSetBytes));

struct Driver {
  decltype(&cuStreamBatchMemOp) batch;
  unsigned wait = CU_STREAM_WAIT_VALUE_GEQ;  // of the difference, so counts may wrap
  Driver() {
    find_driver_function("cuStreamBatchMemOp", batch);
    int device = 0, flushes = 0;
    FSDP_CUDA_CHECK(cudaGetDevice(&device));
    FSDP_CUDA_CHECK(cudaDeviceGetAttribute(&flushes, cudaDevAttrCanFlushRemoteWrites, device));
    if (flushes != 0) wait |= CU_STREAM_WAIT_VALUE_FLUSH;  // peers' copies before their flags, on links that reorder
  }
};

const Driver& driver() {
  static const Driver* const found = new Driver;
  return *found;
}

CUdeviceptr address_of(const void* memory) { return reinterpret_cast<CUdeviceptr>(memory); }

}  // namespace

std::uint32_t* StreamMeeting::flags(int rank, int set) const {
  return reinterpret_cast<std::uint32_t*>(static_cast<std::byte*>(flags_[static_cast<std::size_t>(rank)]) +
                                          set * kSetBytes);
}

void StreamMeeting::meet_in_graph() {
  Meeting meeting{.count = flags(rank_, kCount),
                  .own_flags = flags(rank_, kOfGraphs),
                  .rank = rank_,
                  .size = static_cast<int>(flags_.size())};
  for (int peer = 0; peer < meeting.size; ++peer) meeting.peer_flags[peer] = flags(peer, kOfGraphs);
  kernels_->meet(meeting);
}

void StreamMeeting::meet(cudaStream_t stream) {
  if (is_recorded(stream)) return meet_in_graph();
  ++meetings_;
  const int size = static_cast<int>(flags_.size());
  std::array<CUstreamBatchMemOpParams, 2 * Meeting::kMost> operations{};
  unsigned count = 0;
  for (int peer = 0; peer < size; ++peer) {  // after what is on the stream, with a fence of the system
    if (peer == rank_) continue;
    auto& write = operations[count++].writeValue;
    write.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
    write.address = address_of(flags(peer, kOfStreams) + rank_);
    write.value = meetings_;
    write.flags = CU_STREAM_WRITE_VALUE_DEFAULT;
  }
  for (int peer = 0; peer < size; ++peer) {
    if (peer == rank_) continue;
    auto& wait = operations[count++].waitValue;
    wait.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
    wait.address = address_of(flags(rank_, kOfStreams) + peer);
    wait.value = meetings_;
    wait.flags = driver().wait;
  }
  FSDP_CHECK(driver().batch(stream, count, operations.data(), 0) == CUDA_SUCCESS, Error,
             "CUDA: a stream could not wait for values of other ranks (cuStreamBatchMemOp)");
}

bool StreamMeeting::rehearse(const PeerGroup& group, std::string& why) {
  const cudaStream_t stream = c10::cuda::getStreamFromPool(/*isHighPriority=*/true).stream();
  if (!all_manage(group, why, [&] { meet(stream); })) {
    // Those who came wait for one that did not: let them go.
    const cudaStream_t other = c10::cuda::getStreamFromPool(/*isHighPriority=*/true).stream();
    FSDP_CUDA_CHECK(cudaMemsetAsync(flags(rank_, kOfStreams), 0x3f, kSetBytes, other));
    for (const cudaStream_t each : {other, stream}) FSDP_CUDA_CHECK(cudaStreamSynchronize(each));
    return false;
  }
  return all_manage(group, why, [&] { FSDP_CUDA_CHECK(cudaStreamSynchronize(stream)); });
}

}  // namespace fsdp
