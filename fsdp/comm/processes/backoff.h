// How a thread waits for what only polling can tell: it sleeps for a share of the time it has waited already, so that
// short waits end quickly and long ones cost next to nothing. Never spins, never yields: ranks may outnumber cores.
#pragma once

#include <chrono>

namespace fsdp::processes {

class Backoff {
 public:
  explicit Backoff(std::chrono::milliseconds deadline);

  // Sleeps. False, at once, when the deadline has passed.
  bool pause();

 private:
  std::chrono::steady_clock::time_point start_, end_;
};

}  // namespace fsdp::processes
