#include "fsdp/base/log.h"

#include <mutex>
#include <utility>

namespace fsdp::log {
namespace {

struct State {
  std::mutex mutex;
  Sink sink;
};

State& state() {
  static State* instance = new State;  // leaked on purpose: worker threads may still log at exit
  return *instance;
}

}  // namespace

void set_sink(Sink sink) {
  std::lock_guard lock(state().mutex);
  state().sink = std::move(sink);
}

void write(Level level, std::string_view message) {
  std::lock_guard lock(state().mutex);
  if (state().sink) state().sink(level, message);
}

}  // namespace fsdp::log
