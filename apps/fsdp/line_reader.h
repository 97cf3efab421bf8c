// Reads a file, or standard input, by lines or by blocks. Memory: one block, or the longest line. One thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace fsdp::app {

class LineReader {
 public:
  static constexpr const char* kStandardInput = "-";

  // Throws UsageError naming a file that is missing, a folder, or cannot be read; as the other calls do when reading
  // fails.
  explicit LineReader(const std::string& path);
  LineReader(const LineReader&) = delete;
  LineReader& operator=(const LineReader&) = delete;
  ~LineReader();

  // The next line without its newline; empty at the end. Valid until the next call.
  [[nodiscard]] std::optional<std::string_view> line();
  // The next bytes, whatever they are; empty at the end. Valid until the next call.
  [[nodiscard]] std::string_view block();

  // "file:12" of the last line, for messages.
  [[nodiscard]] std::string where() const;

 private:
  bool fill();  // false at the end

  std::string name_;
  int file_ = -1;
  std::string buffer_;  // [begin_, end) is not yet handed out
  std::size_t begin_ = 0;
  std::int64_t lines_ = 0;
};

}  // namespace fsdp::app
