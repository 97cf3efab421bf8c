// `fsdp data prepare`: text, or tokens that another program made, into a pair of token files to train on.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace fsdp::app {

struct DataPrepareOptions {
  std::vector<std::string> inputs;  // "-": standard input
  std::string output;               // prefix of the pair
  std::string format = "text";      // text, jsonl, tokens
  std::string key = "text";         // jsonl: of the string
  std::string document = "file";    // text: file, line, paragraph
  std::int64_t append_token = -1;   // at the end of each document; -1: none
  std::int64_t vocabulary = 0;      // 0: 256 for bytes, and what append_token needs
  std::string dtype;                // empty: the smallest for the vocabulary
  bool overwrite = false;
};

// Writes the pair and returns a report of a few lines. Streams: memory is that of the longest line. Throws UsageError
// naming file and line of an input that is wrong, and leaves no output then.
[[nodiscard]] std::string data_prepare(const DataPrepareOptions& options);

}  // namespace fsdp::app
