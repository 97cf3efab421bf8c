#include "fsdp/comm/nccl/mapped_peer_memory.h"

#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/runtime/cuda/cuda_check.h"

namespace fsdp {

std::shared_ptr<MappedPeerMemory> MappedPeerMemory::create(const std::vector<PeerPart>& parts, Kernels& kernels,
                                                           const PeerGroup& group, std::string& why) {
  auto memory = std::make_shared<MappedPeerMemory>();
  memory->rank_ = group.rank;
  memory->size_ = group.size;
  std::vector<std::shared_ptr<MemoryPiece>> own;
  bool good = all_manage(group, why, [&] {
    memory->make_own(parts);
    for (const Part& part : memory->parts_) own.push_back(part.own);
    own.push_back(MemoryPiece::create_rounded(StreamMeeting::kFlags, /*shareable=*/true));
    memory->flags_ = std::make_unique<MappedRange>(std::vector{own.back()});
    FSDP_CUDA_CHECK(cudaMemset(memory->flags_->data(), 0, static_cast<std::size_t>(StreamMeeting::kFlags.value())));
    FSDP_CUDA_CHECK(cudaDeviceSynchronize());
  });
  good = good && map_pieces(own, group, memory->peers_, why);
  good = good && all_manage(group, why, [&] {
           std::vector<void*> flags;
           for (int rank = 0; rank < group.size; ++rank)
             flags.push_back(rank == group.rank ? memory->flags_->data()
                                                : memory->peers_[static_cast<std::size_t>(rank)].back()->data());
           memory->meeting_.emplace(kernels, group.rank, std::move(flags));
           memory->touch_peers();
         });
  good = good && memory->meeting_->rehearse(group, why);
  return good ? memory : nullptr;
}

void MappedPeerMemory::make_own(const std::vector<PeerPart>& parts) {
  struct Wanted {
    int parts = 0, places = 0, kept = 0;
  };
  std::map<std::int64_t, Wanted> wanted;
  for (const PeerPart& part : parts) {
    Wanted& w = wanted[part.share.value()];
    ++w.parts;
    w.places = std::max(w.places, part.places);
    w.kept += part.kept;
  }
  const auto piece_of = [](std::int64_t size) {
    return size == 0 ? nullptr : MemoryPiece::create(Bytes(size), /*shareable=*/false);
  };
  for (const auto& [share, w] : wanted) {
    for (int i = std::min(w.places + w.kept, w.parts); i > 0; --i) {
      places_[share].push_back({piece_of(share * rank_), piece_of(share * (size_ - 1 - rank_))});
      places_size_ += Bytes(share * (size_ - 1));
    }
  }
  for (const PeerPart& wants : parts) {
    Part part{.share = wants.share.value(), .own = MemoryPiece::create(wants.share, /*shareable=*/true)};
    part.resting = std::make_unique<MappedRange>(std::vector{part.own});
    for (const Place& place : places_[part.share]) {
      std::vector<std::shared_ptr<MemoryPiece>> pieces{place.before, part.own, place.after};
      std::erase(pieces, nullptr);
      part.wholes.push_back(std::make_unique<MappedRange>(std::move(pieces)));
      wholes_[part.wholes.back()->data()] = {static_cast<int>(parts_.size()), static_cast<int>(part.wholes.size()) - 1};
    }
    parts_.push_back(std::move(part));
  }
}

// The first copy from a device sets up more.
void MappedPeerMemory::touch_peers() const {
  const cudaStream_t stream = c10::cuda::getStreamFromPool(/*isHighPriority=*/true).stream();
  for (const auto& [whole, place] : wholes_) read_peers(const_cast<void*>(whole), stream);
  FSDP_CUDA_CHECK(cudaStreamSynchronize(stream));
}

void* MappedPeerMemory::share(int part) const { return parts_[static_cast<std::size_t>(part)].resting->data(); }

void* MappedPeerMemory::acquire(int part) {
  const Part& wanted = parts_[static_cast<std::size_t>(part)];
  auto& places = places_.at(wanted.share);
  for (std::size_t i = 0; i < places.size(); ++i) {
    if (places[i].taken) continue;
    places[i].taken = true;
    return wanted.wholes[i]->data();
  }
  return nullptr;
}

void MappedPeerMemory::release(void* whole) {
  const auto [part, place] = wholes_.at(whole);
  places_.at(parts_[static_cast<std::size_t>(part)].share)[static_cast<std::size_t>(place)].taken = false;
}

void MappedPeerMemory::read_peers(void* whole, cudaStream_t stream) const {
  const auto index = static_cast<std::size_t>(wholes_.at(whole).first);
  const Part& part = parts_[index];
  for (int step = 1; step < size_; ++step) {  // not all from the same one at once
    const int peer = (rank_ + step) % size_;
    FSDP_CUDA_CHECK(cudaMemcpyAsync(static_cast<std::byte*>(whole) + peer * part.share,
                                    peers_[static_cast<std::size_t>(peer)][index]->data(),
                                    static_cast<std::size_t>(part.share), cudaMemcpyDeviceToDevice, stream));
  }
}

}  // namespace fsdp
