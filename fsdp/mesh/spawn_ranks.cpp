#include "fsdp/mesh/spawn_ranks.h"

#include <netinet/in.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/env.h"
#include "fsdp/base/log.h"

namespace fsdp {
namespace {

constexpr const char* kSpawned = "FSDP_SPAWNED";
constexpr std::chrono::seconds kPatience{10};  // for ranks to end after one has failed, then after SIGTERM
constexpr std::chrono::milliseconds kInterval{20};

std::vector<std::string> own_arguments() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  const std::string all((std::istreambuf_iterator<char>(file)), {});
  std::vector<std::string> arguments;
  for (std::size_t begin = 0; begin < all.size();) {
    const auto end = all.find('\0', begin);
    arguments.push_back(all.substr(begin, end - begin));
    if (end == std::string::npos) break;
    begin = end + 1;
  }
  return arguments;
}

// Outside of the range out of which the system serves connections, where there is room: ranks that have just ended
// leave many of those behind.
std::pair<int, int> range_of_ports() {
  constexpr int kFirst = 1024, kLast = 65535, kRoom = 1000, kWidest = 16000;
  int low = 32768, high = 60999;
  std::ifstream("/proc/sys/net/ipv4/ip_local_port_range") >> low >> high;
  if (low - kFirst >= kRoom) return {std::max(kFirst, low - kWidest), low - 1};
  if (kLast - high >= kRoom) return {high + 1, kLast};
  return {kFirst, kLast};
}

// Free now; another server could take it before rank 0 does, which then says so.
int free_port() {
  constexpr int kTries = 100;
  const auto [first, last] = range_of_ports();
  std::random_device source;
  std::uniform_int_distribution<int> ports(first, last);
  for (int i = 0; i < kTries; ++i) {
    const int port = ports(source);
    const int handle = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<std::uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_ANY);
    const bool good = handle >= 0 && bind(handle, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
    if (handle >= 0) close(handle);
    if (good) return port;
  }
  detail::fail<Error>("no free port on this machine for the ranks to meet: tried {} from {} to {}", kTries, first,
                      last);
}

pid_t start(int rank, int count, int port, std::vector<std::string>& arguments) {
  const pid_t parent = getpid();
  const pid_t child = fork();
  FSDP_CHECK(child >= 0, Error, "rank {} cannot be started (fork)", rank);
  if (child > 0) return child;
  prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (getppid() != parent) _exit(1);
  signal(SIGINT, SIG_DFL);
  const std::string number = std::to_string(rank), size = std::to_string(count), at = std::to_string(port);
  setenv(kSpawned, "1", 1);
  setenv("RANK", number.c_str(), 1);
  setenv("LOCAL_RANK", number.c_str(), 1);
  setenv("WORLD_SIZE", size.c_str(), 1);
  setenv("LOCAL_WORLD_SIZE", size.c_str(), 1);
  setenv("MASTER_ADDR", "127.0.0.1", 1);
  setenv("MASTER_PORT", at.c_str(), 1);
  std::vector<char*> pointers;
  for (auto& argument : arguments) pointers.push_back(argument.data());
  pointers.push_back(nullptr);
  execv("/proc/self/exe", pointers.data());
  _exit(127);
}

volatile sig_atomic_t terminated = 0;

}  // namespace

std::optional<int> spawn_ranks(int count) {
  if (env::text(kSpawned)) return std::nullopt;
  FSDP_CHECK(count >= 1, UsageError, "expected at least 1 rank to start, got {}", count);
  auto arguments = own_arguments();
  const int port = free_port();
  signal(SIGINT, SIG_IGN);  // the ranks get it too, and end
  signal(SIGTERM, [](int) { terminated = terminated + 1; });
  std::vector<pid_t> running;
  std::map<pid_t, int> ranks;
  for (int rank = 0; rank < count; ++rank) {
    running.push_back(start(rank, count, port, arguments));
    ranks[running.back()] = rank;
  }
  const auto send = [&](int number) {
    for (const pid_t child : running) kill(child, number);
  };
  using Clock = std::chrono::steady_clock;
  std::optional<int> failed;
  std::optional<Clock::time_point> deadline;
  int signals = 0, forwarded = 0;  // sent by us; of those that came
  while (!running.empty()) {
    int status = 0;
    const pid_t ended = waitpid(-1, &status, WNOHANG);
    if (ended > 0) {
      const auto rank = ranks.at(ended);
      std::erase(running, ended);
      const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
      if (code != 0 && !failed) {
        if (WIFSIGNALED(status)) {
          log::write(log::Level::warning, fmt::format("rank {} was ended by signal {}; the others have {} s to end",
                                                      rank, WTERMSIG(status), kPatience.count()));
        }
        failed = code;
        deadline = Clock::now() + kPatience;
      }
      if (forwarded > 0 && !deadline) deadline = Clock::now() + kPatience;  // the others end at about this time
      continue;
    }
    if (ended < 0 && errno == ECHILD) break;
    if (terminated > forwarded) {  // ranks may need long to save what they have; a second signal says that it is enough
      send(SIGTERM);
      if (forwarded > 0) deadline = Clock::now() + kPatience;
      forwarded = terminated;
      signals = 1;
      if (!failed) failed = 128 + SIGTERM;
    }
    if (deadline && Clock::now() > *deadline) {
      send(signals++ == 0 ? SIGTERM : SIGKILL);
      deadline = Clock::now() + kPatience;
    }
    std::this_thread::sleep_for(kInterval);
  }
  return failed.value_or(0);
}

}  // namespace fsdp
