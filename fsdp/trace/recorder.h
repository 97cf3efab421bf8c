// Collects spans in the order in which the host issued them.
//
// One recorder serves one rank. `issue` is called by that rank's host thread only; `begin` and `end` may come from the
// worker thread that runs the span, each span from one thread. Times are whatever clock the runtime uses (wall clock or
// virtual). Read the spans when no work is in flight.
#pragma once

#include <cstddef>
#include <deque>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "fsdp/trace/span.h"

namespace fsdp::trace {

class Recorder {
 public:
  // Reserves the next place in issue order and returns the span to fill; its address never changes.
  Span* issue(const char* interned_name, Kind kind, std::int32_t stream);

  // The same text gives the same pointer for the recorder's life.
  const char* intern(std::string_view text);

  [[nodiscard]] std::vector<Span> spans() const;  // [issue order]
  [[nodiscard]] std::size_t size() const;
  void clear();

 private:
  mutable std::mutex mutex_;
  std::deque<Span> spans_;  // [issue order]; a deque keeps addresses
  std::unordered_set<std::string> names_;
};

}  // namespace fsdp::trace
