// `fsdp data inspect`: what token files hold, after reading all of it.
#pragma once

#include <string>
#include <vector>

namespace fsdp::app {

struct DataInspectOptions {
  std::vector<std::string> files;  // prefixes of pairs, or plain files
  bool json = false;
};

// A few lines a file, or one JSON object a file and line. Checks every byte: throws UsageError naming file and position
// of what is wrong.
[[nodiscard]] std::string data_inspect(const DataInspectOptions& options);

}  // namespace fsdp::app
