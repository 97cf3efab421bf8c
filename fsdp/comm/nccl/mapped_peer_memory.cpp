#include "fsdp/comm/nccl/mapped_peer_memory.h"

#include <c10/cuda/CUDAStream.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/runtime/cuda/cuda_check.h"

namespace fsdp {

std::shared_ptr<MappedPeerMemory> MappedPeerMemory::create(const std::vector<PeerPart>& parts,
                                                           const PeerMemoryOptions& options, std::string& why) {
  auto memory = std::make_shared<MappedPeerMemory>();
  memory->rank_ = options.rank;
  memory->size_ = options.size;
  // Every stage ends with an agreement, so that no rank waits for one that has failed.
  const auto stage = [&](const std::function<void()>& work) {
    bool good = true;
    try {
      work();
    } catch (const std::exception& error) {
      why = error.what();
      good = false;
    }
    return options.all_agree(good);
  };
  std::vector<int> own;
  std::vector<std::vector<int>> descriptors;
  bool good = stage([&] {
    memory->make_own(parts);
    for (const Part& part : memory->parts_) own.push_back(part.own->export_descriptor());
  });
  good = good && stage([&] {
           descriptors = exchange_descriptors(own, options.rank, options.size, options.all_gather, options.deadline);
         });
  for (int descriptor : own) close(descriptor);
  good = good && stage([&] { memory->map_peers(descriptors); });
  for (const auto& some : descriptors) {
    for (int descriptor : some) {
      if (descriptor >= 0) close(descriptor);  // not mapped, for others failed
    }
  }
  good = good && stage([&] { memory->touch_peers(); });
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

void MappedPeerMemory::map_peers(std::vector<std::vector<int>>& descriptors) {
  for (auto& part : parts_) part.peers.resize(static_cast<std::size_t>(size_));
  for (std::size_t rank = 0; rank < descriptors.size(); ++rank) {
    for (std::size_t i = 0; i < descriptors[rank].size(); ++i)
      parts_[i].peers[rank] = std::make_unique<MappedRange>(
          std::vector{MemoryPiece::import(std::exchange(descriptors[rank][i], -1), Bytes(parts_[i].share))});
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
  const Part& part = parts_[static_cast<std::size_t>(wholes_.at(whole).first)];
  for (int step = 1; step < size_; ++step) {  // not all from the same one at once
    const int peer = (rank_ + step) % size_;
    FSDP_CUDA_CHECK(cudaMemcpyAsync(static_cast<std::byte*>(whole) + peer * part.share,
                                    part.peers[static_cast<std::size_t>(peer)]->data(),
                                    static_cast<std::size_t>(part.share), cudaMemcpyDeviceToDevice, stream));
  }
}

}  // namespace fsdp
