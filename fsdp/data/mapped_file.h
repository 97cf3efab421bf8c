// A whole file in memory, read only, by mmap: pages come in when they are read and count as cache.
//
// Owns the mapping. Const calls from any thread. The file must not be shortened while it is mapped: reading what is
// gone ends the process (SIGBUS).
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>

namespace fsdp::data {

class MappedFile {
 public:
  // Throws UsageError naming a file that is missing, no regular file, empty, or may not be read.
  explicit MappedFile(std::filesystem::path path);
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();

  [[nodiscard]] const std::filesystem::path& path() const { return path_; }
  [[nodiscard]] std::span<const std::byte> bytes() const { return bytes_; }

 private:
  void unmap() noexcept;

  std::filesystem::path path_;
  std::span<const std::byte> bytes_;
};

}  // namespace fsdp::data
