#include "fsdp/trace/recorder.h"

namespace fsdp::trace {

const char* to_string(Kind kind) {
  switch (kind) {
    case Kind::compute:
      return "compute";
    case Kind::all_gather:
      return "all_gather";
    case Kind::reduce_scatter:
      return "reduce_scatter";
    case Kind::all_reduce:
      return "all_reduce";
    case Kind::broadcast:
      return "broadcast";
    case Kind::all_to_all:
      return "all_to_all";
    case Kind::send_recv:
      return "send_recv";
    case Kind::barrier:
      return "barrier";
    case Kind::wait:
      return "wait";
    case Kind::unit:
      return "unit";
  }
  return "?";
}

Span* Recorder::issue(const char* interned_name, Kind kind, std::int32_t stream) {
  std::lock_guard lock(mutex_);
  Span& span = spans_.emplace_back();
  span.name = interned_name;
  span.kind = kind;
  span.stream = stream;
  return &span;
}

const char* Recorder::intern(std::string_view text) {
  std::lock_guard lock(mutex_);
  return names_.emplace(text).first->c_str();
}

std::vector<Span> Recorder::spans() const {
  std::lock_guard lock(mutex_);
  return {spans_.begin(), spans_.end()};
}

std::size_t Recorder::size() const {
  std::lock_guard lock(mutex_);
  return spans_.size();
}

void Recorder::clear() {
  std::lock_guard lock(mutex_);
  spans_.clear();
}

}  // namespace fsdp::trace
