#include "fsdp/checkpoint/rank_status.h"

#include <algorithm>
#include <cstring>
#include <exception>

#include "fsdp/base/check.h"
#include "fsdp/mesh/all_hosts.h"

namespace fsdp::checkpoint {
namespace {

constexpr std::size_t kText = 512;  // bytes of a rank's message; the first says whether there is one

}  // namespace

RankStatus::RankStatus(const World& world)
    : runtime_(world.host().runtime()),
      communicator_(all_hosts(world, "checkpoint")),
      stream_(runtime_->make_stream("checkpoint")) {}

void RankStatus::wait() const {
  Event done;
  stream_.record(done);
  done.synchronize();
}

void RankStatus::agree(const std::exception_ptr& error, const std::string& text) const {
  std::string mine(kText, '\0');
  if (error) {
    mine[0] = 1;
    std::memcpy(mine.data() + 1, text.data(), std::min(text.size(), kText - 2));
  }
  std::string all(kText * static_cast<std::size_t>(size()), '\0');
  communicator_.all_gather(mine.data(), all.data(), Elements(kText), c10::kByte, stream_, "checkpoint: status");
  wait();
  if (error) std::rethrow_exception(error);
  for (int r = 0; r < size(); ++r) {
    const char* its = all.data() + kText * static_cast<std::size_t>(r);
    FSDP_CHECK(its[0] == 0, Error, "rank {} failed: {}", r, its + 1);
  }
}

std::vector<std::vector<std::int64_t>> RankStatus::gather(const std::vector<std::int64_t>& values) const {
  const auto count = static_cast<std::int64_t>(values.size());
  std::vector<std::int64_t> counts(static_cast<std::size_t>(size()));
  communicator_.all_gather(&count, counts.data(), Elements(1), c10::kLong, stream_, "checkpoint: counts");
  wait();
  const std::int64_t most = *std::max_element(counts.begin(), counts.end());
  std::vector<std::int64_t> padded(values);
  padded.resize(static_cast<std::size_t>(most));
  std::vector<std::int64_t> all(static_cast<std::size_t>(most * size()));
  if (most > 0) {
    communicator_.all_gather(padded.data(), all.data(), Elements(most), c10::kLong, stream_, "checkpoint: values");
    wait();
  }
  std::vector<std::vector<std::int64_t>> result;
  for (int r = 0; r < size(); ++r) {
    const auto begin = all.begin() + r * most;
    result.emplace_back(begin, begin + counts[static_cast<std::size_t>(r)]);
  }
  return result;
}

std::vector<std::int64_t> RankStatus::maximum(std::vector<std::int64_t> values) const {
  std::vector<std::int64_t> result(values.size());
  if (values.empty()) return result;
  communicator_.all_reduce(values.data(), result.data(), Elements(static_cast<std::int64_t>(values.size())), c10::kLong,
                           ReduceOp::max, stream_, "checkpoint: maximum");
  wait();
  return result;
}

}  // namespace fsdp::checkpoint
