#include "fsdp/checkpoint/tensor_reader.h"

#include <fcntl.h>
#include <unistd.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "fsdp/base/check.h"
#include "fsdp/checkpoint/safetensors.h"

namespace fsdp::checkpoint {

std::uint64_t checksum(std::span<const std::byte> bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }

TensorReader::~TensorReader() { close_all(); }

void TensorReader::close_all() {
  for (const auto& [file, descriptor] : open_) ::close(descriptor);
  open_.clear();
}

void TensorReader::read(const std::string& key, ElementRange range, std::span<std::byte> to) {
  const StoredTensor* tensor = index_.find(key);
  FSDP_INVARIANT(tensor != nullptr);
  const std::int64_t width = element_bytes(tensor->dtype);
  FSDP_INVARIANT(static_cast<std::int64_t>(to.size()) == std::max<std::int64_t>(range.length(), 0) * width);
  FSDP_INVARIANT(range.empty() || (range.begin >= 0 && range.end <= tensor->elements()));
  auto piece = std::upper_bound(tensor->pieces.begin(), tensor->pieces.end(), range.begin,
                                [](std::int64_t element, const auto& p) { return element < p.elements.end; });
  for (; piece != tensor->pieces.end() && piece->elements.begin < range.end; ++piece) {
    const ElementRange part = intersect(piece->elements, range);
    read_checked(key, *piece, piece->elements.length() * width, (part.begin - piece->elements.begin) * width,
                 to.subspan(static_cast<std::size_t>((part.begin - range.begin) * width),
                            static_cast<std::size_t>(part.length() * width)));
  }
}

void TensorReader::read_checked(const std::string& key, const StoredPiece& piece, std::int64_t piece_bytes,
                                std::int64_t begin, std::span<std::byte> to) {
  if (piece.checksums.empty()) return read_file(piece.file, piece.offset + begin, to);
  const std::int64_t end = begin + static_cast<std::int64_t>(to.size());
  for (std::int64_t at = begin / kChecksumBlock * kChecksumBlock; at < end; at += kChecksumBlock) {
    const std::int64_t length = std::min(kChecksumBlock, piece_bytes - at);
    const std::int64_t from = std::max(begin, at), until = std::min(end, at + length);
    const bool whole = from == at && until == at + length;
    const auto wanted = to.subspan(static_cast<std::size_t>(from - begin), static_cast<std::size_t>(until - from));
    if (!whole) block_.resize(static_cast<std::size_t>(length));
    const std::span<std::byte> block = whole ? wanted : std::span(block_);
    read_file(piece.file, piece.offset + at, block);
    const auto number = static_cast<std::size_t>(at / kChecksumBlock);
    FSDP_CHECK(number < piece.checksums.size() && checksum(block) == piece.checksums[number], UsageError,
               "{} is damaged: the checksum of bytes {} to {}, of \"{}\", is not the index's",
               index_.files()[piece.file].path.string(), piece.offset + at, piece.offset + at + length, key);
    if (!whole) std::memcpy(wanted.data(), block.data() + (from - at), wanted.size());
  }
}

void TensorReader::read_file(int file, std::int64_t offset, std::span<std::byte> to) {
  const auto& path = index_.files()[file].path;
  auto found = open_.find(file);
  if (found == open_.end()) {
    if (open_.size() >= kMostOpen) close_all();
    const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    FSDP_CHECK(descriptor >= 0, UsageError, "{} cannot be read: {}", path.string(), std::strerror(errno));
    found = open_.emplace(file, descriptor).first;
  }
  bytes_read_ += static_cast<std::int64_t>(to.size());
  while (!to.empty()) {
    const auto count = ::pread(found->second, to.data(), to.size(), offset);
    if (count < 0 && errno == EINTR) continue;
    FSDP_CHECK(count != 0, UsageError, "{} was cut short while it was read", path.string());
    FSDP_CHECK(count > 0, UsageError, "reading {} failed: {}", path.string(), std::strerror(errno));
    to = to.subspan(static_cast<std::size_t>(count));
    offset += count;
  }
}

}  // namespace fsdp::checkpoint
