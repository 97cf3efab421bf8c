// What the calling thread is doing for fsdp::recompute, for those who must behave differently inside it.
#pragma once

#include <functional>
#include <memory>
#include <vector>

namespace fsdp {

class FsdpModule;
class Scheduler;

struct RecomputeState {
  // A first run of the function, untracked, whose results will have a backward all the same.
  bool tracks_later = false;
  const FsdpModule* first_unit = nullptr;  // that it has run
  // Backwards of recomputed functions under way, one inside the other. Autograd runs each as a graph task of its own.
  int depth = 0;
  int outermost_task = -1;  // graph task in which the outermost of them runs
  // Run when that task ends.
  std::shared_ptr<std::vector<std::function<void()>>> at_end;
  // Whose units began their backward inside the current one.
  std::vector<Scheduler*> schedulers;
};

// Of the calling thread.
[[nodiscard]] RecomputeState& recompute_state();

// The graph task that a backward hook belongs to: the outermost one, -1 outside of backward.
[[nodiscard]] int backward_task();

}  // namespace fsdp
