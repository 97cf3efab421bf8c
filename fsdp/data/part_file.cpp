#include "fsdp/data/part_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "fsdp/base/check.h"

namespace fsdp::data {
namespace {

constexpr std::size_t kBuffer = 1 << 20;  // bytes

}  // namespace

PartFile::PartFile(std::filesystem::path path) : path_(std::move(path)), part_(path_.native() + ".part") {
  file_ = ::open(part_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  FSDP_CHECK(file_ >= 0, UsageError, "{} cannot be written: {}", part_.string(), std::strerror(errno));
  if (::flock(file_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {  // some file systems have no locks
    ::close(file_);
    detail::fail<UsageError>("{} is being written by another process", part_.string());
  }
  exists_ = true;
  buffer_.reserve(kBuffer);
  if (::ftruncate(file_, 0) != 0) fail("emptying");
}

PartFile::~PartFile() {
  if (exists_) ::unlink(part_.c_str());
  if (file_ >= 0) ::close(file_);
}

void PartFile::append(std::span<const std::byte> bytes) {
  if (buffer_.size() + bytes.size() > kBuffer) flush();
  if (bytes.size() > kBuffer) {
    write_at(written_, bytes);
    written_ += static_cast<std::int64_t>(bytes.size());
  } else {
    buffer_.insert(buffer_.end(), bytes.begin(), bytes.end());
  }
}

void PartFile::replace(std::int64_t offset, std::span<const std::byte> bytes) {
  flush();
  write_at(offset, bytes);
}

void PartFile::read(std::int64_t offset, std::span<std::byte> bytes) {
  flush();
  while (!bytes.empty()) {
    const auto count = ::pread(file_, bytes.data(), bytes.size(), offset);
    if (count < 0 && errno == EINTR) continue;
    if (count == 0) errno = EIO;  // it was just written
    if (count <= 0) fail("reading");
    bytes = bytes.subspan(static_cast<std::size_t>(count));
    offset += count;
  }
}

void PartFile::close() {
  flush();
  if (::fsync(file_) != 0) fail("writing");
  if (::close(std::exchange(file_, -1)) != 0) fail("writing");
}

void PartFile::publish() {
  FSDP_INVARIANT(file_ < 0);
  if (::rename(part_.c_str(), path_.c_str()) != 0) fail("renaming");
  exists_ = false;
}

void PartFile::flush() {
  write_at(written_, buffer_);
  written_ += static_cast<std::int64_t>(buffer_.size());
  buffer_.clear();
}

void PartFile::write_at(std::int64_t offset, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const auto count = ::pwrite(file_, bytes.data(), bytes.size(), offset);
    if (count < 0 && errno == EINTR) continue;
    if (count == 0) errno = EIO;
    if (count <= 0) fail("writing");
    bytes = bytes.subspan(static_cast<std::size_t>(count));
    offset += count;
  }
}

void PartFile::fail(const char* doing) const {
  detail::fail<Error>("{} {} failed: {}", doing, part_.string(), std::strerror(errno));
}

}  // namespace fsdp::data
