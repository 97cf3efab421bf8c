// One named interval on one stream.
#pragma once

#include <cstdint>

namespace fsdp::trace {

enum class Kind : std::uint8_t {
  compute,     // an operator or a piece of forward or backward on a compute stream
  all_gather,  // communication ...
  reduce_scatter,
  all_reduce,
  broadcast,
  all_to_all,
  send_recv,
  barrier,
  wait,  // the compute thread or stream stood still for communication
  unit,  // a unit's operation (unshard, reshard, ...): structure, counted neither as compute nor as communication
};

[[nodiscard]] const char* to_string(Kind kind);
[[nodiscard]] constexpr bool is_communication(Kind kind) { return kind >= Kind::all_gather && kind <= Kind::barrier; }

using Nanoseconds = std::int64_t;
inline constexpr Nanoseconds kUnset = -1;

struct Span {
  const char* name = "";  // interned, by the recorder or for the process; outlives the span
  Kind kind = Kind::unit;
  std::int32_t stream = 0;    // stream id given by the runtime; 0 is compute
  std::int64_t sequence = 0;  // sequence number of a collective on its communicator, else 0
  std::int64_t bytes = 0;     // payload of a collective, else 0
  Nanoseconds begin = kUnset;
  Nanoseconds end = kUnset;  // kUnset while running
};

}  // namespace fsdp::trace
