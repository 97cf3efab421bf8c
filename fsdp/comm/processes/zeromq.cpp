// The transport over ZeroMQ. The only file that includes zmq.h; built into libfsdp_zeromq.so.
//
// Each process has one socket that receives from everyone and one to each other process. A message is two frames, its
// tag and its data. ZeroMQ's own thread moves them, so what was sent has left the caller's buffer at once, and what
// comes waits here until somebody asks for it.
#include <zmq.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <list>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "fsdp/comm/processes/transport.h"

namespace fsdp::processes {
namespace {

constexpr int kLingerMilliseconds = 2000;  // for what is still under way when the process ends

void check(bool good, const char* call) {
  if (!good) throw std::runtime_error(std::string(call) + ": " + zmq_strerror(zmq_errno()));
}

class ZeroMqTransport final : public Transport {
 public:
  explicit ZeroMqTransport(const Bootstrap& bootstrap) : rank_(bootstrap.rank), context_(zmq_ctx_new()) {
    check(context_ != nullptr, "zmq_ctx_new");
    const bool ipv6 = bootstrap.address.find(':') != std::string::npos;
    inbox_ = make_socket(ZMQ_ROUTER, ipv6);
    const std::string address = "tcp://" + (ipv6 ? "[" + bootstrap.address + "]" : bootstrap.address) + ":*";
    check(zmq_bind(inbox_, address.c_str()) == 0, "zmq_bind");
    char endpoint[256] = {};
    std::size_t length = sizeof(endpoint);
    check(zmq_getsockopt(inbox_, ZMQ_LAST_ENDPOINT, endpoint, &length) == 0, "zmq_getsockopt");
    const auto endpoints = bootstrap.exchange(endpoint);
    outboxes_.resize(endpoints.size());
    for (int r = 0; r < static_cast<int>(endpoints.size()); ++r) {
      if (r == rank_) continue;
      outboxes_[r] = make_socket(ZMQ_DEALER, ipv6);
      const std::string name = name_of(rank_);
      check(zmq_setsockopt(outboxes_[r], ZMQ_ROUTING_ID, name.data(), name.size()) == 0, "zmq_setsockopt");
      check(zmq_connect(outboxes_[r], endpoints[r].c_str()) == 0, "zmq_connect");
    }
  }
  ~ZeroMqTransport() override {
    for (void* socket : outboxes_) {
      if (socket != nullptr) zmq_close(socket);
    }
    if (inbox_ != nullptr) zmq_close(inbox_);
    if (context_ != nullptr) zmq_ctx_term(context_);
  }

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(outboxes_.size()); }
  int largest_tag() const override { return (1 << 30); }
  std::size_t eager_bytes() const override { return 16 << 10; }

  Request send(const void* data, std::size_t bytes, int to, int tag) override {
    std::lock_guard lock(mutex_);
    check(zmq_send(outboxes_.at(to), &tag, sizeof(tag), ZMQ_SNDMORE) >= 0, "zmq_send");
    check(zmq_send(outboxes_[to], data, bytes, 0) >= 0, "zmq_send");
    return {};
  }
  Request receive(void* data, std::size_t bytes, int from, int tag) override {
    auto receive = std::make_unique<Receive>(Receive{data, bytes, from, tag});
    std::lock_guard lock(mutex_);
    const auto found = std::find_if(unexpected_.begin(), unexpected_.end(), [&](const Unexpected& message) {
      return matches(*receive, message.from, message.tag);
    });
    if (found != unexpected_.end()) {
      complete(*receive, found->from, &found->data);
      zmq_msg_close(&found->data);
      unexpected_.erase(found);
    } else {
      posted_.push_back(receive.get());
    }
    return {receive.release()};
  }
  Request receive_from_any(void* data, std::size_t bytes, int tag) override { return receive(data, bytes, -1, tag); }

  bool test(Request& request, Arrival* arrival) override {
    if (request.handle == nullptr) return true;
    auto* receive = static_cast<Receive*>(request.handle);
    std::lock_guard lock(mutex_);
    take_what_came();
    if (!receive->done) return false;
    if (!receive->fits) throw std::runtime_error("a message is larger than its receiver expected");
    if (arrival != nullptr) *arrival = receive->arrival;
    delete receive;
    request.handle = nullptr;
    return true;
  }

  void abandon(Request& request, bool /*receiving*/) override {
    auto* receive = static_cast<Receive*>(request.handle);
    request.handle = nullptr;
    if (receive == nullptr) return;
    std::lock_guard lock(mutex_);
    posted_.remove(receive);
    delete receive;
  }

  void close() override {}  // the destructor waits until all is delivered

 private:
  struct Receive {
    void* data;
    std::size_t bytes;
    int from, tag;  // from -1: anyone
    bool done = false, fits = true;
    Arrival arrival = {};
  };
  struct Unexpected {
    int from, tag;
    zmq_msg_t data;
  };

  static bool matches(const Receive& receive, int from, int tag) {
    return receive.tag == tag && (receive.from == from || receive.from == -1);
  }
  static void complete(Receive& receive, int from, zmq_msg_t* data) {
    const std::size_t bytes = zmq_msg_size(data);
    receive.fits = bytes <= receive.bytes;
    if (receive.fits && bytes > 0) std::memcpy(receive.data, zmq_msg_data(data), bytes);
    receive.arrival = {from, bytes};
    receive.done = true;
  }
  static std::string name_of(int rank) { return "rank " + std::to_string(rank); }

  void* make_socket(int kind, bool ipv6) {
    void* socket = zmq_socket(context_, kind);
    check(socket != nullptr, "zmq_socket");
    const int unlimited = 0, linger = kLingerMilliseconds, v6 = ipv6 ? 1 : 0;
    for (const auto& [option, value] : {std::pair{ZMQ_SNDHWM, unlimited}, std::pair{ZMQ_RCVHWM, unlimited},
                                        std::pair{ZMQ_LINGER, linger}, std::pair{ZMQ_IPV6, v6}})
      check(zmq_setsockopt(socket, option, &value, sizeof(value)) == 0, "zmq_setsockopt");
    return socket;
  }

  // -> whether a frame was there
  bool next_frame(zmq_msg_t* frame) {
    zmq_msg_init(frame);
    if (zmq_msg_recv(frame, inbox_, ZMQ_DONTWAIT) >= 0) return true;
    const int error = zmq_errno();
    zmq_msg_close(frame);
    if (error != EAGAIN && error != EINTR)
      throw std::runtime_error(std::string("zmq_msg_recv: ") + zmq_strerror(error));
    return false;
  }

  void take_what_came() {
    zmq_msg_t sender, tag_frame, data;
    while (next_frame(&sender)) {
      // The frames of a message come together.
      if (!next_frame(&tag_frame)) throw std::runtime_error("half a message came");
      if (!next_frame(&data)) throw std::runtime_error("half a message came");
      const std::string name(static_cast<const char*>(zmq_msg_data(&sender)), zmq_msg_size(&sender));
      const int from = std::atoi(name.c_str() + std::strlen("rank "));
      int tag = 0;
      std::memcpy(&tag, zmq_msg_data(&tag_frame), std::min(sizeof(tag), zmq_msg_size(&tag_frame)));
      zmq_msg_close(&sender);
      zmq_msg_close(&tag_frame);
      const auto found =
          std::find_if(posted_.begin(), posted_.end(), [&](const Receive* r) { return matches(*r, from, tag); });
      if (found == posted_.end()) {
        unexpected_.push_back({from, tag, {}});
        zmq_msg_init(&unexpected_.back().data);
        zmq_msg_move(&unexpected_.back().data, &data);
      } else {
        complete(**found, from, &data);
        posted_.erase(found);
      }
      zmq_msg_close(&data);
    }
  }

  const int rank_;
  void* context_ = nullptr;
  void* inbox_ = nullptr;
  std::vector<void*> outboxes_;  // [rank], none for this one

  std::mutex mutex_;                  // guards the sockets, which belong to no thread, and what follows
  std::list<Receive*> posted_;        // in order
  std::list<Unexpected> unexpected_;  // in order
};

std::string library() {
  int major = 0, minor = 0, patch = 0;
  zmq_version(&major, &minor, &patch);
  return "ZeroMQ v" + std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(patch);
}

}  // namespace
}  // namespace fsdp::processes

extern "C" __attribute__((visibility("default"))) const fsdp::processes::Module fsdp_transport_module = {
    fsdp::processes::kModuleVersion, "zeromq", &fsdp::processes::library,
    [](const fsdp::processes::Bootstrap& bootstrap) -> std::unique_ptr<fsdp::processes::Transport> {
      return std::make_unique<fsdp::processes::ZeroMqTransport>(bootstrap);
    }};
