#include "apps/fsdp/interrupt.h"

#include <signal.h>

#include <atomic>

namespace fsdp::app {
namespace {

std::atomic<bool> flag{false};
static_assert(std::atomic<bool>::is_always_lock_free, "a signal handler writes it");

}  // namespace

void install_interrupt_handler() {
  struct sigaction action = {};
  action.sa_handler = [](int) { flag.store(true); };
  action.sa_flags = SA_RESETHAND | SA_RESTART;  // the second one takes the default action
  for (const int signal : {SIGINT, SIGTERM}) sigaction(signal, &action, nullptr);
}

bool interrupted() { return flag.load(); }

}  // namespace fsdp::app
