// This process as a rank of a job: its transport, and the mailboxes of its groups.
//
// One message at a time is received from anyone and put into the mailbox of its group; whoever waits for anything moves
// it on by calling progress(). Messages of one sender are seen in the order sent, so a rank's farewell comes after all
// it had to say. Any thread.
#pragma once

#include <chrono>
#include <compare>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "fsdp/comm/processes/message.h"
#include "fsdp/comm/processes/transport.h"

namespace fsdp::processes {

class Process {
 public:
  // The one of this process; connected at first, found later. `module` is kMpiModule or kZeroMqModule; `bootstrap` is
  // called when there is something to connect, on a thread that may outlive this call. Throws UsageError when the
  // module cannot be opened, CommunicationError when the other processes do not come within the deadline.
  static std::shared_ptr<Process> connect(const char* module, const std::function<Bootstrap()>& bootstrap,
                                          std::chrono::milliseconds deadline);

  // Says farewell, waits until all others have, ends the library. Waits at most the deadline, or two seconds after a
  // failure and while an exception unwinds; the library is left as it is then.
  ~Process();

  [[nodiscard]] const std::string& transport_name() const { return name_; }  // "mpi", "zeromq"
  [[nodiscard]] int rank() const { return transport_->rank(); }
  [[nodiscard]] int size() const { return transport_->size(); }
  [[nodiscard]] Transport& transport() const { return *transport_; }
  [[nodiscard]] std::size_t inline_limit() const { return inline_limit_; }  // bytes of data in a small message

  // World ids are handed out in order, alike on all ranks.
  [[nodiscard]] std::uint64_t next_world() { return ++worlds_; }

  void post(int to, std::vector<std::byte> message);
  // A tag for data that follows a message.
  [[nodiscard]] int next_data_tag();

  // Moves messages on.
  void progress();

  // Announcements for a group, by one sender on one lane.
  struct Source {
    std::uint64_t group = 0;
    Lane lane = Lane::collective;
    int from = 0;
    auto operator<=>(const Source&) const = default;
  };
  // The next one at `epoch`, in the order sent; those of earlier epochs are dropped. Null: none yet.
  [[nodiscard]] std::unique_ptr<Message> take(const Source& source, std::int32_t epoch);
  [[nodiscard]] bool has_left(int rank);
  // The reason for which a group at `epoch` was aborted by another rank; empty: it was not.
  [[nodiscard]] std::string aborted(std::uint64_t group, std::int32_t epoch);
  // Whether `from` has reset the group to `epoch` or later.
  [[nodiscard]] bool has_reset(std::uint64_t group, int from, std::int32_t epoch);
  [[nodiscard]] std::string failure(std::uint64_t world);

  void fail_world(std::uint64_t world, const std::string& reason);
  void forget(std::uint64_t group);

 private:
  Process(std::string name, std::unique_ptr<Transport> transport, std::chrono::milliseconds deadline);

  void deliver(int from, Message message);
  void reap_outbox();

  struct Notices {
    std::map<std::int32_t, std::string> aborts;  // by epoch
    std::map<int, std::int32_t> resets;          // by sender: the epoch it went to
  };
  struct Outgoing {
    Request request;
    std::vector<std::byte> bytes;
  };

  const std::string name_;
  std::unique_ptr<Transport> transport_;
  const std::chrono::milliseconds deadline_;
  std::size_t inline_limit_ = 0;

  std::mutex progress_mutex_;  // one thread at a time receives
  std::vector<std::byte> incoming_;
  Request receiving_;

  std::mutex mutex_;  // guards everything below
  std::deque<Outgoing> outbox_;
  std::map<Source, std::deque<Message>> announcements_;
  std::map<std::uint64_t, Notices> notices_;            // by group
  std::map<std::uint64_t, std::string> failed_worlds_;  // by world
  std::set<int> left_;
  std::uint64_t worlds_ = 0;
  int data_tag_ = 0;
  bool failed_ = false;
};

// "Open MPI v4.1.4", or why the module cannot be used.
struct LibraryInfo {
  bool available = false;
  std::string text;
};
[[nodiscard]] LibraryInfo library_info(const char* module);

}  // namespace fsdp::processes
