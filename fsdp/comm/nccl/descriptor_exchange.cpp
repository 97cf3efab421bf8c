#include "fsdp/comm/nccl/descriptor_exchange.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>

#include "fsdp/base/check.h"

namespace fsdp {
namespace {

constexpr std::size_t kBatch = 200;  // descriptors a message; the system takes 253
constexpr std::size_t kName = 64;    // bytes of a socket's name

struct Header {
  int rank = 0, first = 0, count = 0;
};

class Socket {
 public:
  Socket() : fd_(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0)) {
    static std::atomic<int> made{0};
    FSDP_CHECK(fd_ >= 0, CommunicationError, "no UNIX socket could be made: {}", std::strerror(errno));
    // A name without a file, gone with the socket.
    std::snprintf(name_ + 1, kName - 1, "fsdp-%d-%d", static_cast<int>(getpid()), made++);
    const sockaddr_un address = address_of(name_);
    FSDP_CHECK(bind(fd_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0, CommunicationError,
               "a UNIX socket could not be bound: {}", std::strerror(errno));
  }
  ~Socket() {
    if (fd_ >= 0) close(fd_);
  }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;

  [[nodiscard]] const char* name() const { return name_; }

  // False when the receiver's queue is full.
  [[nodiscard]] bool send(const char* to, const Header& header, const int* descriptors) const {
    Header copy = header;
    iovec data{&copy, sizeof(copy)};
    alignas(cmsghdr) char control[CMSG_SPACE(kBatch * sizeof(int))] = {};
    const std::size_t bytes = static_cast<std::size_t>(header.count) * sizeof(int);
    sockaddr_un address = address_of(to);
    msghdr message{};
    message.msg_name = &address;
    message.msg_namelen = sizeof(address);
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(bytes);
    cmsghdr* part = CMSG_FIRSTHDR(&message);
    part->cmsg_level = SOL_SOCKET;
    part->cmsg_type = SCM_RIGHTS;
    part->cmsg_len = CMSG_LEN(bytes);
    std::memcpy(CMSG_DATA(part), descriptors, bytes);
    if (sendmsg(fd_, &message, MSG_DONTWAIT) >= 0) return true;
    FSDP_CHECK(errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS, CommunicationError,
               "descriptors could not be sent to another rank: {}", std::strerror(errno));
    return false;
  }

  // False when nothing is there.
  [[nodiscard]] bool receive(std::vector<std::vector<int>>& all) const {
    Header header;
    iovec data{&header, sizeof(header)};
    alignas(cmsghdr) char control[CMSG_SPACE(kBatch * sizeof(int))];
    msghdr message{};
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    const ssize_t got = recvmsg(fd_, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return false;
    const cmsghdr* part = got == sizeof(header) ? CMSG_FIRSTHDR(&message) : nullptr;
    const auto rank = static_cast<std::size_t>(header.rank), first = static_cast<std::size_t>(header.first),
               count = static_cast<std::size_t>(header.count);
    const bool good = part != nullptr && part->cmsg_type == SCM_RIGHTS && rank < all.size() &&
                      part->cmsg_len == CMSG_LEN(count * sizeof(int)) && first + count <= all[rank].size();
    FSDP_CHECK(good, CommunicationError, "another rank's descriptors did not arrive whole");
    std::memcpy(all[rank].data() + first, CMSG_DATA(part), count * sizeof(int));
    return true;
  }

  void wait(std::chrono::milliseconds time) const {
    pollfd one{fd_, POLLIN, 0};
    poll(&one, 1, static_cast<int>(time.count()));
  }

 private:
  static sockaddr_un address_of(const char* name) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, name, kName);
    return address;
  }

  char name_[kName] = {};  // begins with a zero byte
  const int fd_;
};

}  // namespace

std::vector<std::vector<int>> exchange_descriptors(const std::vector<int>& own, int rank, int size,
                                                   const HostAllGather& all_gather,
                                                   std::chrono::milliseconds deadline) {
  const Socket socket;
  std::vector<char> names(kName * static_cast<std::size_t>(size));
  all_gather(socket.name(), names.data(), kName);  // all sockets are there when this returns
  struct Received {
    std::vector<std::vector<int>> all;
    bool whole = false;
    ~Received() {
      for (const auto& some : all) {
        for (int descriptor : some) {
          if (!whole && descriptor >= 0) close(descriptor);
        }
      }
    }
  } here{std::vector<std::vector<int>>(static_cast<std::size_t>(size), std::vector<int>(own.size(), -1))};
  auto& all = here.all;
  all[static_cast<std::size_t>(rank)].clear();
  struct Message {
    int to;
    Header header;
  };
  std::vector<Message> to_send;
  for (int step = 1; step < size; ++step) {
    for (std::size_t first = 0; first < own.size(); first += kBatch) {
      const std::size_t count = std::min(kBatch, own.size() - first);
      to_send.push_back({(rank + step) % size, {rank, static_cast<int>(first), static_cast<int>(count)}});
    }
  }
  std::size_t sent = 0, received = 0;
  const auto start = std::chrono::steady_clock::now();
  // Both in turns: whoever only sends fills a queue that nobody empties.
  while (sent < to_send.size() || received < to_send.size()) {
    bool moved = false;
    if (sent < to_send.size()) {
      const Message& next = to_send[sent];
      if (socket.send(names.data() + kName * static_cast<std::size_t>(next.to), next.header,
                      own.data() + next.header.first)) {
        ++sent;
        moved = true;
      }
    }
    while (received < to_send.size() && socket.receive(all)) {
      ++received;
      moved = true;
    }
    if (moved) continue;
    FSDP_CHECK(std::chrono::steady_clock::now() - start < deadline, CommunicationError,
               "rank {} of {}: descriptors of shared memory: {} of {} messages came within {} ms", rank, size, received,
               to_send.size(), deadline.count());
    socket.wait(std::chrono::milliseconds(1));
  }
  here.whole = true;
  return std::move(all);
}

}  // namespace fsdp
