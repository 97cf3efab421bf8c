// One operation of a group, from its announcement to its data.
//
// 1. Every rank tells its peers what it is about to do; what fits into that message comes with it.
// 2. When all have come, the announcements are compared: ranks that run different things fail with both names, and a
//    rank that does not come is known by name.
// 3. Data moves straight between the buffers of each pair. Sums are made here, in rank order (comm/reduce_kernels.h),
//    block by block while later blocks arrive.
// What is still under way when an exchange fails is given up by its destructor.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "fsdp/comm/processes/backoff.h"
#include "fsdp/comm/processes/process_group.h"

namespace fsdp::processes {

class Exchange {
 public:
  Exchange(ProcessGroup& group, const Collective& operation);
  ~Exchange();
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  void run();

 private:
  struct Range {
    const std::byte* data = nullptr;
    std::size_t bytes = 0;
  };
  struct Part {
    std::byte* data = nullptr;
    std::size_t bytes = 0;
  };
  struct Pending {
    Request request;
    int peer;
  };

  // All of an all_reduce goes to everyone when it fits into the first message; else each rank sums one part of it.
  [[nodiscard]] bool reduces_whole() const;
  [[nodiscard]] bool fits_inline(std::size_t bytes) const { return bytes <= group_.process().inline_limit(); }
  // What peer `r` gets of this rank's buffer first.
  [[nodiscard]] Range outgoing(int r) const;
  // Where the data of peer `r` belongs when it is not reduced.
  [[nodiscard]] Part destination(int r) const;

  void announce();
  void await_announcements();
  void compare() const;
  void compare_with_peer() const;

  void move();
  void move_and_reduce();
  void copy_own_part() const;
  // Sums elements [first, first + count) of the send buffers into `out`.
  void reduce_part(std::int64_t first, std::int64_t count, std::byte* out);

  void send(int peer, Range range, std::size_t block);
  void receive(int peer, Part part);
  // Until at most `left` receives, the latest, are under way.
  void await_receives(std::size_t left);
  void await_transfers();

  void pause_or_fail(Backoff& backoff, std::span<const int> missing);
  [[noreturn]] void fail_for_missing(std::span<const int> missing, const std::string& how);

  ProcessGroup& group_;
  Transport& transport_;
  const Collective& operation_;
  const GroupOptions& options_;
  std::vector<int> peers_;                          // group ranks
  std::vector<std::unique_ptr<Message>> messages_;  // [group rank]
  std::vector<int> data_tags_;                      // [group rank] announced to that peer
  std::vector<Pending> sends_, receives_;
};

}  // namespace fsdp::processes
