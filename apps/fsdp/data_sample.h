// `fsdp data sample`: a stretch of tokens, as ids or as text.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace fsdp::app {

struct DataSampleOptions {
  std::string file;                      // prefix of a pair, or a plain file
  std::optional<std::int64_t> document;  // from its first token, not beyond its last
  std::optional<std::int64_t> position;  // from this token, not beyond the file's last; neither: document 0
  std::int64_t length = 64;              // tokens
  bool text = false;                     // tokens below 256 as bytes
};

// Throws UsageError naming what is there when document or position are not.
[[nodiscard]] std::string data_sample(const DataSampleOptions& options);

// Bytes for a terminal: UTF-8 as it is; control characters, backslashes and what is no UTF-8 as \n, \t, \\ or \xHH.
[[nodiscard]] std::string printable(std::string_view bytes);

}  // namespace fsdp::app
