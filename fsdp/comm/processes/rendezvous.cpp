#include "fsdp/comm/processes/rendezvous.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <memory>

#include "fsdp/base/check.h"
#include "fsdp/base/env.h"

namespace fsdp::processes {
namespace {

constexpr const char* kKey = "fsdp/address/";

std::string first_line(const std::exception& error) {
  const std::string text = error.what();
  return text.substr(0, text.find('\n'));
}

std::vector<std::string> exchange(c10d::TCPStore& store, const RendezvousOptions& options, const std::string& prefix,
                                  const std::string& own, bool runs_store) {
  store.set(prefix + std::to_string(options.rank), std::vector<std::uint8_t>(own.begin(), own.end()));
  std::vector<std::string> all;
  for (int r = 0; r < options.size; ++r) {
    const auto key = prefix + std::to_string(r);
    try {
      store.wait({key}, options.deadline);
    } catch (const std::exception& error) {
      detail::fail<CommunicationError>("rank {} waited {} ms for rank {} to come to {}:{}: {}", options.rank,
                                       options.deadline.count(), r, store.getHost(), store.getPort(),
                                       first_line(error));
    }
    const auto value = store.get(key);
    all.emplace_back(value.begin(), value.end());
  }
  // The process that runs the store must not end before the last has read it.
  store.set(prefix + "done/" + std::to_string(options.rank), std::vector<std::uint8_t>{1});
  if (runs_store) {
    std::vector<std::string> keys;
    for (int r = 0; r < options.size; ++r) keys.push_back(prefix + "done/" + std::to_string(r));
    store.wait(keys, options.deadline);
  }
  return all;
}

}  // namespace

std::string own_address_towards(const std::string& host) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  const int code = getaddrinfo(host.c_str(), "1", &hints, &found);
  FSDP_CHECK(code == 0, UsageError, "the host {} of MASTER_ADDR is not known: {}", host, gai_strerror(code));
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> release(found, &freeaddrinfo);
  for (const addrinfo* entry = found; entry != nullptr; entry = entry->ai_next) {
    // Connecting a datagram socket sends nothing; it only chooses the way.
    const int socket_handle = socket(entry->ai_family, SOCK_DGRAM, 0);
    if (socket_handle < 0) continue;
    sockaddr_storage address{};
    socklen_t length = sizeof(address);
    const bool good = connect(socket_handle, entry->ai_addr, entry->ai_addrlen) == 0 &&
                      getsockname(socket_handle, reinterpret_cast<sockaddr*>(&address), &length) == 0;
    close(socket_handle);
    char text[NI_MAXHOST] = {};
    if (good &&
        getnameinfo(reinterpret_cast<sockaddr*>(&address), length, text, sizeof(text), nullptr, 0, NI_NUMERICHOST) == 0)
      return text;
  }
  detail::fail<UsageError>("there is no way from this machine to the host {} of MASTER_ADDR", host);
}

Bootstrap make_rendezvous(const RendezvousOptions& options) {
  const auto host = env::text("MASTER_ADDR");
  const auto port = env::integer("MASTER_PORT");
  FSDP_CHECK(host && port, UsageError,
             "RANK and WORLD_SIZE name {} processes, but MASTER_ADDR and MASTER_PORT, where they find each other, are "
             "not both set; torchrun sets all of them",
             options.size);
  FSDP_CHECK(*port > 0 && *port < 65536, UsageError, "MASTER_PORT is {}, expected 1 to 65535", *port);
  const bool agent_runs_store = env::text("TORCHELASTIC_USE_AGENT_STORE") == "True";
  c10d::TCPStoreOptions store_options;
  store_options.port = static_cast<std::uint16_t>(*port);
  store_options.isServer = options.rank == 0 && !agent_runs_store;
  store_options.numWorkers = static_cast<std::size_t>(options.size);
  store_options.waitWorkers = false;
  store_options.timeout = options.deadline;
  std::shared_ptr<c10d::TCPStore> store;
  try {
    store = std::make_shared<c10d::TCPStore>(*host, store_options);
  } catch (const std::exception& error) {
    detail::fail<CommunicationError>("rank {} cannot reach the store at {}:{} (MASTER_ADDR, MASTER_PORT): {}",
                                     options.rank, *host, *port, first_line(error));
  }
  // After a restart by torchrun the store still holds the addresses of the attempt before.
  const auto prefix = fmt::format("{}{}/", kKey, env::text("TORCHELASTIC_RESTART_COUNT").value_or("0"));
  return {.rank = options.rank,
          .size = options.size,
          .address = own_address_towards(*host),
          .exchange = [store, options, prefix, runs_store = store_options.isServer](const std::string& own) {
            return exchange(*store, options, prefix, own, runs_store);
          }};
}

}  // namespace fsdp::processes
