#include <condition_variable>
#include <memory>
#include <mutex>
#include <stdexcept>

#include "fsdp/mesh/run_ranks.h"
#include "tests/support/ranks.h"

namespace fsdp::testing {
namespace {

class SharedNotes final : public SideChannel {
 public:
  explicit SharedNotes(int size) : values_(static_cast<std::size_t>(size)) {}

  std::vector<std::int64_t> gather(int rank, std::int64_t value) override {
    std::unique_lock lock(mutex_);
    values_[rank] = value;
    if (++arrived_ == static_cast<int>(values_.size())) {
      arrived_ = 0;
      result_ = values_;
      ++generation_;
      changed_.notify_all();
      return result_;
    }
    const auto mine = generation_;
    if (!changed_.wait_for(lock, std::chrono::seconds(20), [&] { return generation_ != mine; }))
      throw std::runtime_error("a rank did not come to the side channel");
    return result_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::int64_t> values_, result_;
  int arrived_ = 0, generation_ = 0;
};

}  // namespace

void run_on_ranks(int size, const RankMain& rank_main, const WorldOptions& options) {
  auto notes = std::make_shared<SharedNotes>(size);
  run_ranks(
      size, [&](World world) { rank_main(std::move(world), *notes); }, options);
}

std::string backend_under_test() { return "threads"; }
std::vector<int> world_sizes_under_test() { return {1, 2, 3, 4, 5}; }
bool ranks_are_processes() { return false; }
int own_process_rank() { return 0; }

}  // namespace fsdp::testing
