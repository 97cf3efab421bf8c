// One group of processes: collectives over messages between pairs.
//
// Every operation begins with a small message from each rank to each other, which says what the rank is about to do
// (exchange.h). A failed group stays failed, on all its ranks, until all reset it. CPU only. Collectives run one at a
// time; messages to and from different ranks, and in both directions of a pair, may be under way together.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "fsdp/comm/backend.h"
#include "fsdp/comm/processes/process.h"

namespace fsdp::processes {

struct GroupOptions {
  std::string name;
  std::string key;             // equal on all members, unique among the groups of a world
  std::vector<int> processes;  // [group rank] rank in the job
  std::vector<int> members;    // [group rank] rank in the world, for messages
  int rank = 0;                // of this process in the group
  std::uint64_t world = 0;     // id
  std::chrono::milliseconds deadline{};
};

class ProcessGroup final : public CommunicatorBackend {
 public:
  ProcessGroup(std::shared_ptr<Process> process, GroupOptions options);
  ~ProcessGroup() override;

  void execute(const Collective& operation) override;
  void abort(const std::string& reason) override;
  void reset() override;

  // For exchanges.
  [[nodiscard]] Process& process() const { return *process_; }
  [[nodiscard]] const GroupOptions& options() const { return options_; }
  [[nodiscard]] int size() const { return static_cast<int>(options_.members.size()); }
  [[nodiscard]] std::uint64_t id() const { return id_; }
  [[nodiscard]] std::int32_t epoch() const { return epoch_; }
  [[nodiscard]] std::vector<std::byte>& scratch() { return scratch_; }  // of the collective that runs
  // Throws AbortedError when the group, or its world, has failed.
  void throw_if_failed(const Collective& operation);

 private:
  const std::shared_ptr<Process> process_;
  const GroupOptions options_;
  const std::uint64_t id_;

  std::mutex collective_;  // held by the collective that runs, or a reset
  std::vector<std::byte> scratch_;
  std::atomic<std::int32_t> epoch_ = 0;  // resets so far
  bool reset_announced_ = false;         // for the epoch after this one

  std::mutex mutex_;  // guards aborted_
  std::string aborted_;
};

}  // namespace fsdp::processes
