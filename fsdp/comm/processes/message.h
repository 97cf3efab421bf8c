// The small messages with which ranks find each other before data moves, and tell each other about failures.
//
// A message is a fixed header, the operation's label, the counts of an all_to_all_v and, when it is small, the data
// itself, so that small operations take one trip. All ranks of a job run the same build on the same kind of processor.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/comm/collective.h"

namespace fsdp::processes {

enum class MessageKind : std::uint8_t {
  operation,  // the sender has come to this operation of the group
  reset,      // the sender resets the group
  abort,      // the group failed on the sender: text
  failure,    // the sender's whole world failed: text
  left,       // the sender has ended: its last message
};

// Announcements of a rank that are matched in order with those of another.
enum class Lane : std::uint8_t { collective, sends, receives };

struct Header {
  std::uint64_t group = 0;  // id; of the world for failure
  std::int64_t count = 0;
  std::int64_t sequence = 0;
  Stamp stamp = {};
  std::int32_t epoch = 0;     // resets of the group before
  std::int32_t data_tag = 0;  // of the data that comes apart
  std::int32_t peer = 0;
  std::uint32_t text_bytes = 0;
  std::uint32_t count_entries = 0;  // of all_to_all_v: send counts, then receive counts
  std::uint32_t inline_bytes = 0;
  MessageKind message = MessageKind::operation;
  Lane lane = Lane::collective;
  std::uint8_t kind = 0, reduce = 0, dtype = 0, sending = 0;
};

struct Message {
  Header header;
  std::string text;                  // label, or the reason of a failure
  std::vector<std::int64_t> counts;  // send, then receive
  std::vector<std::byte> data;       // what came inline

  // Views this message: `label` lives as long as it does.
  [[nodiscard]] Collective operation() const;
};

// The header fields that describe `operation`.
[[nodiscard]] Header header_of(const Collective& operation);

[[nodiscard]] std::vector<std::byte> encode(Header header, std::string_view text,
                                            const std::vector<std::int64_t>& counts, const void* data,
                                            std::size_t inline_bytes);
[[nodiscard]] Message decode(const std::byte* bytes, std::size_t size);

}  // namespace fsdp::processes
