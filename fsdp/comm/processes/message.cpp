#include "fsdp/comm/processes/message.h"

#include <cstring>

#include "fsdp/base/check.h"

namespace fsdp::processes {

Header header_of(const Collective& operation) {
  Header header;
  header.kind = static_cast<std::uint8_t>(operation.kind);
  header.reduce = static_cast<std::uint8_t>(operation.reduce);
  header.dtype = static_cast<std::uint8_t>(operation.dtype);
  header.sending = operation.sending ? 1 : 0;
  header.peer = operation.peer;
  header.count = operation.count;
  header.sequence = operation.sequence;
  header.stamp = operation.stamp;
  return header;
}

Collective Message::operation() const {
  Collective operation;
  operation.kind = static_cast<trace::Kind>(header.kind);
  operation.reduce = static_cast<ReduceOp>(header.reduce);
  operation.dtype = static_cast<c10::ScalarType>(header.dtype);
  operation.sending = header.sending != 0;
  operation.peer = header.peer;
  operation.count = header.count;
  operation.sequence = header.sequence;
  operation.stamp = header.stamp;
  operation.label = text.c_str();
  return operation;
}

std::vector<std::byte> encode(Header header, std::string_view text, const std::vector<std::int64_t>& counts,
                              const void* data, std::size_t inline_bytes) {
  header.text_bytes = static_cast<std::uint32_t>(text.size());
  header.count_entries = static_cast<std::uint32_t>(counts.size());
  header.inline_bytes = static_cast<std::uint32_t>(inline_bytes);
  const std::size_t count_bytes = counts.size() * sizeof(std::int64_t);
  std::vector<std::byte> bytes(sizeof(Header) + text.size() + count_bytes + inline_bytes);
  std::byte* at = bytes.data();
  const auto append = [&](const void* from, std::size_t size) {
    if (size > 0) std::memcpy(at, from, size);
    at += size;
  };
  append(&header, sizeof(Header));
  append(text.data(), text.size());
  append(counts.data(), count_bytes);
  append(data, inline_bytes);
  return bytes;
}

Message decode(const std::byte* bytes, std::size_t size) {
  Message message;
  FSDP_CHECK(size >= sizeof(Header), CommunicationError,
             "a message of {} bytes came, expected at least {}: do all ranks run the same build?", size,
             sizeof(Header));
  std::memcpy(&message.header, bytes, sizeof(Header));
  const auto& header = message.header;
  const std::size_t count_bytes = header.count_entries * sizeof(std::int64_t);
  const std::size_t expected = sizeof(Header) + header.text_bytes + count_bytes + header.inline_bytes;
  FSDP_CHECK(size == expected, CommunicationError,
             "a message of {} bytes came, expected {}: do all ranks run the same build?", size, expected);
  const std::byte* at = bytes + sizeof(Header);
  message.text.assign(reinterpret_cast<const char*>(at), header.text_bytes);
  at += header.text_bytes;
  message.counts.resize(header.count_entries);
  if (count_bytes > 0) std::memcpy(message.counts.data(), at, count_bytes);
  message.data.assign(at + count_bytes, bytes + size);
  return message;
}

}  // namespace fsdp::processes
