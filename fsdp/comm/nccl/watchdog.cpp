#include "fsdp/comm/nccl/watchdog.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <thread>

#include "fsdp/runtime/cuda/cuda_check.h"
#include "fsdp/runtime/cuda/is_recorded.h"

namespace fsdp::nccl {
namespace {

constexpr std::chrono::milliseconds kInterval{100};
constexpr std::chrono::seconds kPatienceAfterFailure{2};
constexpr std::chrono::milliseconds kTimeToSend{300};
constexpr std::size_t kMostWatched = 1024;  // operations of one group under way; later ones wait behind them anyway

class Watchdog {
 public:
  static Watchdog& instance() {
    static auto* watchdog = new Watchdog;  // never destroyed: its thread may outlive main
    return *watchdog;
  }
  void add(const std::shared_ptr<Watch>& watch) {
    std::lock_guard lock(mutex_);
    watches_.push_back(watch);
    if (!started_) std::thread([this] { run(); }).detach();
    started_ = true;
  }

 private:
  [[noreturn]] void run() {
    for (;;) {
      std::this_thread::sleep_for(kInterval);
      std::vector<std::shared_ptr<Watch>> alive;
      {
        std::lock_guard lock(mutex_);
        std::erase_if(watches_, [](const auto& watch) { return watch.expired(); });
        for (const auto& watch : watches_) {
          if (auto held = watch.lock()) alive.push_back(std::move(held));
        }
      }
      for (const auto& watch : alive) watch->look();
    }
  }
  std::mutex mutex_;
  std::vector<std::weak_ptr<Watch>> watches_;
  bool started_ = false;
};

}  // namespace

Watch::Watch(WatchOptions options) : options_(std::move(options)) { cudaGetDevice(&device_); }

std::shared_ptr<Watch> Watch::make(WatchOptions options) {
  std::shared_ptr<Watch> watch(new Watch(std::move(options)));
  Watchdog::instance().add(watch);
  return watch;
}

Watch::~Watch() {
  for (const Entry& entry : entries_) cudaEventDestroy(entry.event);
  for (cudaEvent_t event : events_) cudaEventDestroy(event);
}

void Watch::enqueued(const Collective& operation, cudaStream_t stream) {
  if (is_recorded(stream)) return;
  std::lock_guard lock(mutex_);
  while (!entries_.empty() && cudaEventQuery(entries_.front().event) == cudaSuccess) {  // usually all but the latest
    last_ended_ = entries_.front().sequence;
    events_.push_back(entries_.front().event);
    entries_.pop_front();
    if (!entries_.empty()) entries_.front().since = Clock::now();
  }
  static_cast<void>(cudaGetLastError());
  if (entries_.size() >= kMostWatched) return;
  Entry entry{nullptr,         operation.kind,  operation.label, operation.sequence,
              operation.count, operation.dtype, Clock::now()};
  if (events_.empty()) {
    FSDP_CUDA_CHECK(cudaEventCreateWithFlags(&entry.event, cudaEventDisableTiming));
  } else {
    entry.event = events_.back();
    events_.pop_back();
  }
  FSDP_CUDA_CHECK(cudaEventRecord(entry.event, stream));
  entries_.push_back(entry);
}

std::shared_ptr<void> Watch::host_call(const char* what) {
  std::lock_guard lock(mutex_);
  host_call_ = what;
  host_call_since_ = Clock::now();
  return {this, [](Watch* watch) {
            std::lock_guard inner(watch->mutex_);
            watch->host_call_ = nullptr;
          }};
}

std::string Watch::describe(const Entry& entry) const {
  return fmt::format("{} \"{}\" #{} of {} {} on {}", trace::to_string(entry.kind), entry.label, entry.sequence,
                     entry.count, c10::toString(entry.dtype), options_.name);
}

void Watch::look() {
  cudaSetDevice(device_);
  std::unique_lock lock(mutex_);
  const auto now = Clock::now();
  while (!entries_.empty()) {
    const cudaError_t code = cudaEventQuery(entries_.front().event);
    if (code == cudaErrorNotReady) break;
    last_ended_ = entries_.front().sequence;
    events_.push_back(entries_.front().event);
    entries_.pop_front();
    if (!entries_.empty()) entries_.front().since = now;
  }
  const bool waiting = !entries_.empty() || host_call_ != nullptr;
  if (!waiting) {
    failure_seen_ = false;
    return;
  }
  const auto since = entries_.empty() ? host_call_since_ : entries_.front().since;
  const std::string what = entries_.empty() ? std::string(host_call_) : describe(entries_.front());
  const std::string after =
      fmt::format("{} operations of this group were issued after #{}, which ended", entries_.size(), last_ended_);
  lock.unlock();
  std::string error;
  {
    std::lock_guard asking(asking_);
    if (!stopped_) error = options_.library_error();
  }
  if (!error.empty()) end_process(fmt::format("{} failed: {}", what, error));
  if (const auto failure = options_.peer_failure(); !failure.empty()) {
    if (!failure_seen_) failure_since_ = now;
    failure_seen_ = true;
    if (now - failure_since_ > kPatienceAfterFailure)
      end_process(fmt::format("{} cannot end, for another rank has failed: {}", what, failure));
  }
  if (now - since > options_.deadline)
    end_process(
        fmt::format("{} did not end within {} ms: a rank of {} has stopped, has died, or runs something else; {}", what,
                    options_.deadline.count(), fmt::join(options_.members, ", "), after));
}

void Watch::stop_asking() {
  std::lock_guard asking(asking_);
  stopped_ = true;
}

void Watch::end_process(const std::string& why) {
  options_.report(fmt::format("rank {}: {}", options_.members[options_.rank], why));
  const auto until = Clock::now() + kTimeToSend;
  while (Clock::now() < until) {  // the report is on its way to the other ranks
    static_cast<void>(options_.peer_failure());
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  _exit(1);  // nothing else returns from here: destructors and exit handlers would wait for the device
}

}  // namespace fsdp::nccl
