#include "fsdp/data/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "fsdp/base/check.h"

namespace fsdp::data {

MappedFile::MappedFile(std::filesystem::path path) : path_(std::move(path)) {
  const int file = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // a pipe must not block here
  FSDP_CHECK(file >= 0 || errno != ENOENT, UsageError, "{} does not exist", path_.string());
  FSDP_CHECK(file >= 0, UsageError, "{} cannot be read: {}", path_.string(), std::strerror(errno));
  struct Closer {
    int file;
    ~Closer() { ::close(file); }  // the mapping stays
  } closer{file};
  struct stat status = {};
  FSDP_CHECK(::fstat(file, &status) == 0, UsageError, "{} cannot be read: {}", path_.string(), std::strerror(errno));
  FSDP_CHECK(!S_ISDIR(status.st_mode), UsageError, "{} is a folder, expected a file", path_.string());
  FSDP_CHECK(S_ISREG(status.st_mode), UsageError, "{} is not a regular file", path_.string());
  FSDP_CHECK(status.st_size > 0, UsageError, "{} is empty", path_.string());
  const auto size = static_cast<std::size_t>(status.st_size);
  void* memory = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, file, 0);
  FSDP_CHECK(memory != MAP_FAILED, UsageError, "{} cannot be mapped into memory: {}", path_.string(),
             std::strerror(errno));
  bytes_ = {static_cast<const std::byte*>(memory), size};
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)), bytes_(std::exchange(other.bytes_, {})) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  if (this != &other) {
    unmap();
    path_ = std::move(other.path_);
    bytes_ = std::exchange(other.bytes_, {});
  }
  return *this;
}

MappedFile::~MappedFile() { unmap(); }

void MappedFile::unmap() noexcept {
  if (!bytes_.empty()) ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

}  // namespace fsdp::data
