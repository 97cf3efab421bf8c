#include "fsdp/mesh/run_ranks.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <exception>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/comm/threads/threads_group.h"
#include "fsdp/mesh/rank_generator.h"

namespace fsdp {
namespace {

constexpr int kMaximumRanks = 256;  // in one process

// The groups of one run, found by key by whichever member asks first.
class GroupRegistry {
 public:
  explicit GroupRegistry(std::chrono::milliseconds deadline) : deadline_(deadline) {}

  std::shared_ptr<ThreadsGroup> find_or_create(std::span<const int> ranks, const std::string& key) {
    std::lock_guard lock(mutex_);
    Entry& entry = groups_[key];
    auto group = entry.group.lock();
    if (!group) {
      std::erase_if(groups_, [&](const auto& other) {  // those that everyone has joined and left
        return other.first != key && other.second.until_joined == nullptr && other.second.group.expired();
      });
      group = std::make_shared<ThreadsGroup>(key.substr(0, key.find('/')), std::vector<int>(ranks.begin(), ranks.end()),
                                             deadline_);
      entry = {group, group, 0};
      if (!failure_.empty()) group->abort(failure_);
      for (int rank : left_) group->leave(rank);
    }
    // Kept until all members have joined: one that joins late still learns what happened to the group.
    if (++entry.joined == static_cast<int>(ranks.size())) entry.until_joined.reset();
    return group;
  }

  void abort(const std::string& reason) {
    std::lock_guard lock(mutex_);
    if (failure_.empty()) failure_ = reason;
    for (auto& [key, entry] : groups_) {
      if (auto group = entry.group.lock()) group->abort(reason);
    }
  }

  void leave(int rank) {
    std::lock_guard lock(mutex_);
    left_.push_back(rank);
    for (auto& [key, entry] : groups_) {
      if (auto group = entry.group.lock()) group->leave(rank);
    }
  }

 private:
  std::chrono::milliseconds deadline_;
  std::mutex mutex_;
  struct Entry {
    std::weak_ptr<ThreadsGroup> group;
    std::shared_ptr<ThreadsGroup> until_joined;
    int joined = 0;
  };
  std::map<std::string, Entry> groups_;
  std::string failure_;
  std::vector<int> left_;  // ranks that have ended
};

}  // namespace

void run_ranks(int size, const std::function<void(World)>& rank_main, const WorldOptions& options) {
  FSDP_CHECK(
      options.device != DeviceKind::cuda, UsageError,
      "in-process ranks run on the CPU only: LibTorch has one backward thread a GPU, on which ranks would wait for "
      "each other. Start one process a GPU (spawn_ranks, torchrun or mpirun)");
  FSDP_CHECK(size >= 1 && size <= kMaximumRanks, UsageError, "expected 1 to {} in-process ranks, got {}", kMaximumRanks,
             size);
  auto registry = std::make_shared<GroupRegistry>(options.deadline);
  const int threads_per_rank = std::max(1, at::get_num_threads() / size);
  std::mutex mutex;
  std::exception_ptr first_error;
  const auto run = [&](int rank) {
    at::set_num_threads(threads_per_rank);
    const OwnRankGenerator generator(static_cast<std::uint64_t>(rank));
    auto backend = std::make_shared<World::Backend>();
    backend->name = "threads";
    backend->rank = Rank(rank);
    backend->size = size;
    backend->runtime = make_cpu_runtime();
    backend->create_group = [registry](std::span<const int> ranks, int group_rank, const std::string& key, GroupUse) {
      return ThreadsGroup::join(registry->find_or_create(ranks, key), group_rank);
    };
    backend->abort = [registry](const std::string& reason) { registry->abort(reason); };
    const auto fail = [&](const std::string& what) {
      {
        std::lock_guard lock(mutex);
        if (!first_error) first_error = std::current_exception();
      }
      registry->abort(fmt::format("rank {} failed: {}", rank, what));
    };
    try {
      rank_main(World(std::move(backend)));
      registry->leave(rank);
    } catch (const std::exception& error) {
      fail(error.what());
    } catch (...) {
      fail("an exception that is not a std::exception");
    }
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) threads.emplace_back(run, rank);
  for (auto& thread : threads) thread.join();
  if (first_error) std::rethrow_exception(first_error);
}

}  // namespace fsdp
