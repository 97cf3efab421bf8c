// A file that appears under its name only when it is whole: written as NAME.part, renamed at the end.
//
// Owns the .part and removes it again unless it was published. One thread. Errors of the disk are thrown as Error with
// the path. Two processes cannot write the same file at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <vector>

namespace fsdp::data {

class PartFile {
 public:
  // `path` is the final name. Throws UsageError when the .part cannot be made or another process is writing it.
  explicit PartFile(std::filesystem::path path);
  PartFile(const PartFile&) = delete;
  PartFile& operator=(const PartFile&) = delete;
  ~PartFile();

  [[nodiscard]] const std::filesystem::path& path() const { return path_; }
  [[nodiscard]] std::int64_t size() const { return written_ + static_cast<std::int64_t>(buffer_.size()); }

  void append(std::span<const std::byte> bytes);  // buffered
  void replace(std::int64_t offset, std::span<const std::byte> bytes);
  void read(std::int64_t offset, std::span<std::byte> bytes);  // what was appended before

  // Everything on the disk; nothing may be written after.
  void close();
  // After close(): the file takes its final name, in place of what was there.
  void publish();

 private:
  void flush();
  void write_at(std::int64_t offset, std::span<const std::byte> bytes);
  [[noreturn]] void fail(const char* doing) const;

  std::filesystem::path path_, part_;
  int file_ = -1;
  bool exists_ = false;       // the .part
  std::int64_t written_ = 0;  // bytes in the file, the buffer comes after them
  std::vector<std::byte> buffer_;
};

}  // namespace fsdp::data
