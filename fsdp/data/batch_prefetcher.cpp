#include "fsdp/data/batch_prefetcher.h"

#include <utility>

#include "fsdp/base/check.h"

namespace fsdp::data {

BatchPrefetcher::BatchPrefetcher(Produce produce, std::int64_t first_step, std::int64_t end_step, int depth)
    : produce_(std::move(produce)),
      end_step_(end_step),
      depth_(static_cast<std::size_t>(depth)),
      next_step_(first_step) {
  FSDP_CHECK(depth >= 1, UsageError, "a prefetch depth of {}: expected 1 or more", depth);
  FSDP_CHECK(first_step <= end_step, UsageError, "steps {} to {} to prefetch: the end is before the start", first_step,
             end_step);
  thread_ = std::thread([this] { run(); });
}

BatchPrefetcher::~BatchPrefetcher() {
  {
    std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  taken_.notify_one();
  thread_.join();
}

BatchPrefetcher::Batches BatchPrefetcher::next(std::int64_t step) {
  std::unique_lock lock(mutex_);
  FSDP_CHECK(step == next_step_ && step < end_step_, UsageError, "step {} was asked for, expected {} of steps up to {}",
             step, next_step_, end_step_ - 1);
  if (ready_.empty()) {
    const auto start = std::chrono::steady_clock::now();
    made_.wait(lock, [&] { return !ready_.empty(); });
    waited_ += std::chrono::steady_clock::now() - start;
  }
  if (ready_.front().error) std::rethrow_exception(ready_.front().error);
  auto batches = std::move(ready_.front().batches);
  ready_.pop_front();
  ++next_step_;
  lock.unlock();
  taken_.notify_one();
  return batches;
}

std::chrono::nanoseconds BatchPrefetcher::waited() const {
  std::lock_guard lock(mutex_);
  return waited_;
}

void BatchPrefetcher::run() {
  std::unique_lock lock(mutex_);
  for (std::int64_t step = next_step_; step < end_step_; ++step) {
    taken_.wait(lock, [&] { return stopped_ || ready_.size() < depth_; });
    if (stopped_) return;
    lock.unlock();
    Made made;
    try {
      made.batches = produce_(step);
    } catch (...) {
      made.error = std::current_exception();
    }
    const bool failed = made.error != nullptr;
    lock.lock();
    ready_.push_back(std::move(made));
    made_.notify_one();
    if (failed) return;
  }
}

}  // namespace fsdp::data
