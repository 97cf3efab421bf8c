// Watches collectives that are under way on the device and host calls into NCCL, and ends the process when one hangs.
//
// A peer that has died or stopped leaves kernels that wait for ever, and NCCL's abort does not return from all of them;
// so there is no way back inside the process. A thread looks at the oldest operation of every group some times a
// second; when it is past the deadline, or another rank has failed and it does not end, the watchdog says what it was,
// and calls _exit. Operations enqueued while a step is captured are not watched: asking for their events would end the
// capture.
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "fsdp/comm/collective.h"

namespace fsdp::nccl {

struct WatchOptions {
  std::string name;          // of the group
  std::vector<int> members;  // [group rank]
  int rank = 0;              // in the group
  std::chrono::milliseconds deadline{};
  std::function<void(const std::string&)> report;
  std::function<std::string()> peer_failure;
  std::function<std::string()> library_error;  // of NCCL itself; empty: none
};

class Watch {
 public:
  // Registered with the watchdog thread while it lives.
  static std::shared_ptr<Watch> make(WatchOptions options);
  ~Watch();

  // After `operation` was enqueued on `stream`. Host thread of the rank.
  void enqueued(const Collective& operation, cudaStream_t stream);

  // A host call that may block, such as "ncclCommDestroy"; until the result goes.
  [[nodiscard]] std::shared_ptr<void> host_call(const char* what);

  // The group is ending: `library_error` is asked no more.
  void stop_asking();

  // By the watchdog thread.
  void look();

 private:
  using Clock = std::chrono::steady_clock;
  struct Entry {
    cudaEvent_t event = nullptr;
    trace::Kind kind = trace::Kind::barrier;
    const char* label = "";
    std::int64_t sequence = 0, count = 0;
    c10::ScalarType dtype = c10::kFloat;
    Clock::time_point since;  // enqueued, or the one before it ended
  };

  explicit Watch(WatchOptions options);
  [[noreturn]] void end_process(const std::string& why);
  [[nodiscard]] std::string describe(const Entry& entry) const;

  const WatchOptions options_;
  int device_ = 0;
  std::mutex asking_;  // held while `library_error` runs; guards stopped_
  bool stopped_ = false;
  std::mutex mutex_;  // guards everything below
  std::deque<Entry> entries_;
  std::vector<cudaEvent_t> events_;  // free ones
  std::int64_t last_ended_ = 0;      // sequence number
  const char* host_call_ = nullptr;
  Clock::time_point host_call_since_, failure_since_;
  bool failure_seen_ = false;
};

}  // namespace fsdp::nccl
