#include "fsdp/comm/nccl/peer_mapping.h"

#include <unistd.h>

#include <exception>
#include <utility>

namespace fsdp {

bool all_manage(const PeerGroup& group, std::string& why, const std::function<void()>& work) {
  bool good = true;
  try {
    work();
  } catch (const std::exception& error) {
    why = error.what();
    good = false;
  }
  return group.all_agree(good);
}

bool map_pieces(const std::vector<std::shared_ptr<MemoryPiece>>& own, const PeerGroup& group, PeerRanges& ranges,
                std::string& why) {
  std::vector<int> sent;
  std::vector<std::vector<int>> received;
  bool good = all_manage(group, why, [&] {
    for (const auto& piece : own) sent.push_back(piece->export_descriptor());
  });
  good = good && all_manage(group, why, [&] {
           received = exchange_descriptors(sent, group.rank, group.size, group.all_gather, group.deadline);
         });
  for (int descriptor : sent) close(descriptor);
  good = good && all_manage(group, why, [&] {
           ranges.resize(received.size());
           for (std::size_t rank = 0; rank < received.size(); ++rank) {
             ranges[rank].resize(own.size());
             for (std::size_t i = 0; i < received[rank].size(); ++i)
               ranges[rank][i] = std::make_unique<MappedRange>(
                   std::vector{MemoryPiece::import(std::exchange(received[rank][i], -1), own[i]->size())});
           }
         });
  for (const auto& some : received) {
    for (int descriptor : some) {
      if (descriptor >= 0) close(descriptor);  // not mapped, for others failed
    }
  }
  return good;
}

}  // namespace fsdp
