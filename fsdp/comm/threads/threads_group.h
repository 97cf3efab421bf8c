// Ranks as threads of one process: the shared state of one group and the backend over it.
//
// Every operation meets twice: once when all ranks have published their buffers, once when all have read what they
// need. Between the two, ranks read each other's memory directly. At each meeting the operations are compared, so ranks
// that run different things fail with both names instead of mixing data. CPU only.
#pragma once

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "fsdp/comm/backend.h"

namespace fsdp {

class ThreadsGroup {
 public:
  // `members` are world ranks, for messages; [group rank].
  ThreadsGroup(std::string name, std::vector<int> members, std::chrono::milliseconds deadline);

  // The backend of one member. Keeps the group alive.
  [[nodiscard]] static std::shared_ptr<CommunicatorBackend> join(std::shared_ptr<ThreadsGroup> group, int group_rank);

  void abort(const std::string& reason);
  // A world rank has ended without an error: whoever waits for it, now or later, fails at once.
  void leave(int world_rank);

 private:
  friend class ThreadsBackend;

  void execute(int rank, const Collective& operation);
  void exchange_with_peer(int rank, const Collective& operation);
  void move_data(int rank, const Collective& operation);
  enum class Meeting : std::uint8_t { start, middle, end };  // of an operation
  // Blocks until all ranks are here. Throws past the deadline, naming the ranks that did not come.
  void meet(int rank, const Collective& operation, Meeting meeting);
  void finish_moving();
  void compare_operations();
  void reset(int rank);
  [[nodiscard]] bool someone_left_without(const std::vector<bool>& arrived) const;
  [[noreturn]] void throw_aborted(int rank, const Collective& operation) const;

  const std::string name_;
  const std::vector<int> members_;
  const std::chrono::milliseconds deadline_;

  // Published before a meeting by their rank only, read by the others after it. [group rank]
  std::vector<Collective> operations_;

  std::mutex mutex_;  // guards everything below
  std::condition_variable changed_;
  std::vector<bool> arrived_;  // [group rank]
  int arrived_count_ = 0;
  std::vector<bool> left_;  // [group rank] ended
  std::int64_t generation_ = 0;
  std::string aborted_;  // the reason; empty while usable
  int moving_ = 0;       // ranks that may still read others' buffers: nobody leaves before they are done
  std::vector<bool> resetting_;
  int resetting_count_ = 0;
  std::int64_t reset_generation_ = 0;

  // Point-to-point meetings: what the sender offers. [from * size + to]
  struct Offer {
    Collective operation;
    bool present = false;
    bool taken = false;
  };
  std::vector<Offer> offers_;
};

}  // namespace fsdp
